"""The demo's processes, from the side of the one that starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from decoded.cli.children import OWN_GROUP

_TAIL_LINES = 15
_LINE_BYTES = 1 << 20


class Line(NamedTuple):
    """Something that a process has told. `what` is `exited` once, with `code`, at its end."""

    child: str
    what: str
    fields: Mapping[str, Any]


class Child:
    """A process of its own, with a log file.

    `speaks`: it exchanges lines with us and ends when we close its pipe. One that does not
    logs all it prints, and ends on SIGTERM.
    """

    def __init__(
        self, name: str, folder: Path, events: asyncio.Queue[Line], speaks: bool = True
    ) -> None:
        self.name = name
        self.code: int | None = None
        self._speaks = speaks
        self._log = folder / f"{name}.log"
        self._events = events
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, module: str, *arguments: str) -> None:
        """Run `python -m module arguments`."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("DECODED_")}
        # From the start: a thread that torch has not been told of would take every core.
        environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *arguments),
                stdin=pipe if self._speaks else null,
                stdout=pipe if self._speaks else log,
                stderr=log,
                env=environ,
                limit=_LINE_BYTES,
                **OWN_GROUP,
            )
        self._reader = asyncio.create_task(self._read(self._process))

    def tell(self, what: str, **fields: Any) -> None:
        """Send a line; lost if the process has ended."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps({"what": what, **fields}).encode() + b"\n")

    async def end(self, patience_s: float) -> None:
        """Ask it to end, wait, and kill it if it stays. Then `code` is its exit code."""
        process, reader = self._process, self._reader
        if process is None or reader is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait([reader], timeout=patience_s)
        if not done:
            self._signal(signal.SIGKILL)
            await reader

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(f"    {line}" for line in lines[-_TAIL_LINES:])

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        if process.stdout is not None:
            async for line in process.stdout:
                fields = json.loads(line)
                self._events.put_nowait(Line(self.name, fields.pop("what"), fields))
        self.code = await process.wait()
        self._events.put_nowait(Line(self.name, "exited", {"code": self.code}))
