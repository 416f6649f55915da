"""Log lines: their shape, and that a stalled reader stalls nobody."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from typing import Any

from decoded.observe.log import BackgroundWriter

SPEAK = """
import logging, sys, structlog
from decoded.observe import log
log.configure(*sys.argv[1:])
said = structlog.get_logger().bind(engine_id="e")
said.debug("small")
said.info("request ended", state="done", rank=0, request_id="r")
logging.getLogger("other").warning("hello %s", "there")
try:
    1 / 0
except ZeroDivisionError:
    said.exception("broke", odd="\\udc80", thing=object)
"""


def speak(level: str, form: str) -> list[str]:
    said = subprocess.run(
        [sys.executable, "-c", SPEAK, level, form], capture_output=True, timeout=60, check=True
    )
    assert said.stdout == b""
    return said.stderr.decode().splitlines()


def test_json_lines() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in speak("info", "auto")]
    ended, other, broke = lines
    assert list(ended) == ["time", "level", "event", "request_id", "engine_id", "rank", "state"]
    assert (ended["event"], ended["request_id"], ended["rank"]) == ("request ended", "r", 0)
    assert ended["time"].endswith("Z")
    assert (other["level"], other["event"], other["logger"]) == ("warning", "hello there", "other")
    assert broke["level"] == "error"
    assert "ZeroDivisionError" in broke["exception"]


def test_levels() -> None:
    assert "small" in speak("debug", "json")[0]
    assert [json.loads(line)["event"] for line in speak("error", "json")] == ["broke"]


def test_console_lines() -> None:
    lines = speak("info", "console")
    assert "request ended" in lines[0]
    assert "request_id=r" in lines[0]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    assert "\x1b" not in "".join(lines)


class Gate(io.StringIO):
    """A stream that takes nothing until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.opened = threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.opened.wait(30)
        return super().write(text)


def test_a_stalled_reader_costs_lines_and_not_time() -> None:
    gate = Gate()
    writer = BackgroundWriter(gate, max_lines=3)
    writer.write("first\n")
    assert gate.asked.wait(30)
    for number in range(10):
        writer.write(f"{number}\n")
    assert writer.dropped == 7
    gate.opened.set()
    writer.close(30)
    *kept, lost = gate.getvalue().splitlines()
    assert kept == ["first", "0", "1", "2"]
    assert json.loads(lost) == {"level": "warning", "event": "log lines were dropped", "lines": 7}


class Broken(io.StringIO):
    """A stream whose reader is gone, until it is mended."""

    mended = False

    def write(self, text: str) -> int:
        if not self.mended:
            raise BrokenPipeError
        return super().write(text)


def test_a_reader_that_is_gone() -> None:
    broken = Broken()
    writer = BackgroundWriter(broken)
    writer.write("nobody reads this\n")
    writer.close(30)
    assert writer.dropped == 1


def test_a_reader_that_comes_back_learns_what_is_missing() -> None:
    gate, broken = threading.Event(), Broken()
    write = broken.write

    def once(text: str) -> int:
        broken.mended = gate.is_set()
        gate.set()
        return write(text)

    broken.write = once  # type: ignore[method-assign]
    writer = BackgroundWriter(broken)
    writer.write("lost\n")
    assert gate.wait(30)
    writer.write("kept\n")
    writer.close(30)
    kept, lost = broken.getvalue().splitlines()
    assert kept == "kept"
    assert json.loads(lost)["lines"] == 1
