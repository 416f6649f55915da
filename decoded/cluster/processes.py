"""Processes that the cluster starts: each in a group of its own, with its words in a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from decoded.cli.children import OWN_GROUP

_TAIL_LINES = 25
# As a traceback ends, wherever it is in a line; warnings may quote errors that were overcome.
_ERROR = re.compile(
    r"^(?!.*\b(?:WARNING|INFO)\b).*?\b([\w.]*(?:Error|Exception): .{1,500})", re.MULTILINE
)
_LINE_BYTES = 4096
_LOOK_EVERY_S = 0.02
_DEAD_WITHIN_S = 15.0
_JANITORS_PATIENCE_S = 5.0


class ClusterError(Exception):
    """The cluster cannot go on; the text says why, with the last words of who is to blame."""


class Child:
    """One process, with all that it starts itself.

    Its group is its own: a signal of the terminal does not reach it, and stopping it ends its
    descendants too. What it says is in `log`, over all its lives. One that has ended can
    be started again.
    """

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self._command = tuple(command)
        self._environ = dict(environ)
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = False
        self._began = 0

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Run the command. Raises ClusterError if there is no such program."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already")
        with self.log.open("ab") as log:
            self._began = log.tell()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environ,
                    **OWN_GROUP,
                )
            except OSError as error:
                raise ClusterError(f"{self.name} cannot be started: {error}") from error
        self._wanted = True

    async def wait(self, within_s: float) -> int:
        """Wait for its end, which is expected; the exit code. Raises ClusterError after a time."""
        self._wanted = False
        try:
            return await asyncio.wait_for(self._running().wait(), within_s)
        except asyncio.TimeoutError:
            raise ClusterError(
                f"{self.name} is not at its end after {within_s:g} s; its log, {self.log}, ends "
                f"with\n{self.tail()}"
            ) from None

    async def stop(self, patience_s: float) -> None:
        """SIGTERM, and SIGKILL for what is left of its group when that takes too long."""
        self._wanted = False
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), patience_s)
        await self._end_group(process)
        self._process = None

    async def kill(self) -> None:
        """kill -9 for it and its descendants, at once; waits until all are gone."""
        self._wanted = False
        await self._end_group(self._running())
        self._process = None

    def check(self) -> None:
        """Raises ClusterError if it has ended without having been told to."""
        if self._wanted and not self.running:
            code = self._running().returncode
            raise ClusterError(
                f"{self.name} ended with code {code}{self._cause()}; its log, {self.log}, ends "
                f"with\n{self.tail()}"
            )

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of its log, indented."""
        return "\n".join(f"    {line}" for line in self.words().splitlines()[-lines:])

    def last_line(self) -> str:
        """The last thing that it has said."""
        size = self.log.stat().st_size if self.log.exists() else 0
        if not size:
            return ""
        with self.log.open("rb") as log:
            log.seek(max(0, size - _LINE_BYTES))
            return log.read().decode(errors="replace").strip().rsplit("\n", 1)[-1]

    def words(self) -> str:
        """Everything that it has said."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _cause(self) -> str:
        """The first error that it has told of in this life: what comes last is often of others."""
        with self.log.open("rb") as log:
            log.seek(self._began)
            found = _ERROR.search(log.read().decode(errors="replace"))
        return f": {found[1].strip()}" if found else ""

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._process

    async def _end_group(self, process: asyncio.subprocess.Process) -> None:
        """SIGKILL for what is left of the group, which outlives its leader; reap the leader.

        First for all but the janitors: they remove the others' shared memory, which would stay
        until the machine's next start, and end by themselves.
        """
        await self._kill_all(process.pid, _JANITORS_PATIENCE_S, lambda one: not _is_janitor(one))
        await self._kill_all(process.pid, 0.0, lambda one: True)
        await process.wait()

    async def _kill_all(
        self, group: int, patience_s: float, chosen: Callable[[psutil.Process], bool]
    ) -> None:
        """Kill those, and wait until they are gone; then up to `patience_s` for the others."""
        loop = asyncio.get_running_loop()
        killed = loop.time()
        while True:
            members = _members(group)
            doomed = [one for one in members if chosen(one)]
            for one in doomed:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            if not members or (not doomed and loop.time() > killed + patience_s):
                return
            if loop.time() > killed + _DEAD_WITHIN_S:
                raise ClusterError(f"processes of {self.name} (group {group}) do not end")
            await asyncio.sleep(_LOOK_EVERY_S)


def _members(group: int) -> list[psutil.Process]:
    """A process group without its zombies, which nobody may ever reap."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _is_janitor(process: psutil.Process) -> bool:
    """Python's resource tracker, or torch's manager of shared memory."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return "multiprocessing.resource_tracker" in command or "torch_shm_manager" in command
