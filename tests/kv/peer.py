"""A second process for the tests: does what it is told in JSON lines, answers in JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from decoded.kv.regions import SharedRegion
from decoded.kv.transfer import TransferEngine, TransferError


class Peer:
    """The parent's end. `tell` then `answer`, or `ask` for both."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kv.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, what: str, *args: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *args]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer died"
        return json.loads(line)

    def ask(self, what: str, *args: Any) -> Any:
        self.tell(what, *args)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(30)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


class _Actor:
    """The other process's end: one region, one engine."""

    region: SharedRegion
    engine: TransferEngine | None = None

    def create(self, name: str, size: int) -> int:
        self.region = SharedRegion.create(name, size)
        return self.region.address

    def attach(self, name: str, size: int) -> int:
        self.region = SharedRegion.attach(name, size)
        return self.region.address

    def fill(self, offset: int, text: str) -> None:
        self.region.buffer[offset : offset + len(text)] = text.encode()

    def fill_all(self, value: int) -> None:
        self.region.buffer[:] = bytes([value]) * self.region.size

    def truncate(self, size: int) -> None:
        os.truncate(f"/dev/shm{self.region.name}", size)

    def unlink(self) -> bool:
        return self.region.unlink()

    def open(self) -> str:
        self.engine = engine = TransferEngine.open("127.0.0.1")
        engine.register(self.region.address, self.region.size)
        return engine.session

    def write(self, session: str, pieces: list[tuple[int, int, int]]) -> str:
        """`pieces`: (offset here, address there, length). "" or the error's text."""
        assert self.engine is not None
        src = [self.region.address + offset for offset, _, _ in pieces]
        try:
            self.engine.write(session, src, [p[1] for p in pieces], [p[2] for p in pieces])
        except TransferError as error:
            return str(error)
        return ""


def main() -> None:
    actor = _Actor()
    for line in sys.stdin:
        what, *args = json.loads(line)
        action: Callable[..., Any] = getattr(actor, what)
        print(json.dumps(action(*args)), flush=True)
    if actor.engine is not None:
        actor.engine.close()


if __name__ == "__main__":
    main()
