"""Processes with descendants: ended as a whole, and heard when they end by themselves."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from decoded.cluster.processes import Child, ClusterError

# Starts a descendant, says both pids, and stays. The descendant takes no notice of SIGTERM.
PARENT = """
import os, signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
code += "print('here', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def python(folder: Path, code: str, name: str = "one") -> Child:
    return Child(name, [sys.executable, "-c", code], folder / f"{name}.log", os.environ)


async def until(holds: Callable[[], object]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> list[str]:
    return os.listdir("/dev/shm")


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_its_descendants_end_with_it(tmp_path: Path, how: str) -> None:
    async def play() -> None:
        child = python(tmp_path, PARENT)
        await child.start()
        await until(lambda: len(child.words().split()) == 2)
        pids = [int(word) for word in child.words().split()]
        assert pids[0] == child.pid
        assert all(lives(pid) for pid in pids)
        await (child.stop(5.0) if how == "stop" else child.kill())
        assert not any(lives(pid) for pid in pids)
        assert not child.running
        child.check()

    asyncio.run(play())


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_its_shared_memory_is_removed(tmp_path: Path, how: str) -> None:
    """Python's resource tracker, a process of the group, does that after its owner's end."""
    code = "from multiprocessing.shared_memory import SharedMemory; import time; "
    code += "s = SharedMemory(create=True, size=8); print(s.name, flush=True); time.sleep(600)"

    async def play() -> None:
        child = python(tmp_path, code)
        await child.start()
        await until(lambda: child.words().endswith("\n"))
        memory = child.words().strip()
        assert memory in shared_memory()
        await (child.stop(0.0) if how == "stop" else child.kill())
        assert memory not in shared_memory()

    asyncio.run(play())


def test_one_that_takes_no_notice_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); "

    async def play() -> None:
        child = python(tmp_path, code + "time.sleep(600)")
        await child.start()
        await until(lambda: "up" in child.words())
        pid = child.pid
        await child.stop(0.1)
        assert not lives(pid)

    asyncio.run(play())


def test_its_end_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def play() -> None:
        child = python(tmp_path, "print('a'); print('no such model'); raise SystemExit(3)", "P1")
        await child.start()
        await until(lambda: not child.running)
        assert child.last_line() == "no such model"
        with pytest.raises(ClusterError, match=r"P1 ended with code 3(.|\n)*\n    no such model"):
            child.check()

    asyncio.run(play())


def test_the_first_error_of_its_last_life_is_told(tmp_path: Path) -> None:
    code = (
        "import os, sys; n = os.path.getsize(sys.argv[1]); print('KeyError: of life', f'{n:04}'); "
    )
    code += "print('x' * 10); print('RuntimeError: see above'); raise SystemExit(1)"

    async def play() -> None:
        log = tmp_path / "log"
        child = Child("P1", [sys.executable, "-c", code, str(log)], log, os.environ)
        for _ in range(2):
            await child.start()
            await until(lambda: not child.running)
        began = len(child.words()) // 2
        with pytest.raises(ClusterError, match=f"code 1: KeyError: of life {began:04}; its log"):
            child.check()

    asyncio.run(play())


def test_it_can_be_started_again_and_keeps_its_log(tmp_path: Path) -> None:
    async def play() -> None:
        child = python(tmp_path, "import time; print('up', flush=True); time.sleep(600)")
        for life in (1, 2):
            await child.start()
            await until(lambda life=life: child.words().split() == ["up"] * life)
            await child.kill()

    asyncio.run(play())


def test_no_such_program(tmp_path: Path) -> None:
    async def play() -> None:
        child = Child("P1", ["/no/such/program"], tmp_path / "log", {})
        with pytest.raises(ClusterError, match=r"P1 cannot be started: .*No such file"):
            await child.start()

    asyncio.run(play())
