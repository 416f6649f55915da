"""A daemon of its own for the commands to talk to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def environment(**variables: str) -> dict[str, str]:
    """This process's, without anything that configures decoded."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("DECODED_")}
    return {**mine, **variables}


@pytest.fixture
def run() -> Run:
    """Run `decoded ARGS` to its end."""

    def run(*args: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "decoded", *map(str, args)],
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="decoded-cli-"))
    yield path
    shutil.rmtree(path)


class Served(NamedTuple):
    """A running `decoded serve`. `lines`: its log so far, parsed; complete after `stop`.

    Lines that Mooncake's C++ code writes to the same place are left out.
    """

    endpoint: str
    process: subprocess.Popen[str]
    lines: list[dict[str, Any]]
    reader: threading.Thread

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.reader.join(10)
        return code


@pytest.fixture
def serve(folder: Path) -> Iterator[Callable[..., Served]]:
    """Start `decoded serve ARGS` and wait until it is ready, or has ended."""
    started: list[Served] = []

    def serve(*args: object) -> Served:
        endpoint = f"ipc://{folder}/d.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "decoded", "serve", "--endpoint", endpoint, *map(str, args)],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        ready = threading.Event()
        lines: list[dict[str, Any]] = []

        def read() -> None:
            assert process.stderr is not None
            with process.stderr as stream:
                for line in filter(lambda line: line.startswith("{"), stream):
                    lines.append(json.loads(line))
                    if lines[-1]["event"] == "ready":
                        ready.set()
            ready.set()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        served = Served(endpoint, process, lines, reader)
        started.append(served)
        assert ready.wait(30), "neither ready nor ended"
        return served

    yield serve
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait(30)
        served.reader.join(10)


@pytest.fixture
def endpoint(serve: Callable[..., Served]) -> str:
    """The endpoint of a daemon with default settings."""
    return serve().endpoint
