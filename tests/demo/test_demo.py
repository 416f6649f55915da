"""The demo as a command: what it prints, its exit code, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

COMMAND = (sys.executable, "-m", "decoded.demo")


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        (*COMMAND, *arguments),
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_behind(folder: Path) -> list[str]:
    """Files in its folder for temporary files, and processes that know of it."""
    files = [path.name for path in folder.iterdir()]
    processes = [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or ())
    ]
    return files + processes


@pytest.mark.parametrize("memory", ["engine", "daemon", "transfer"])
def test_everything_is_as_it_should_be(tmp_path: Path, memory: str) -> None:
    shared = set(os.listdir("/dev/shm"))
    with start(tmp_path, "--json", "--memory", memory) as demo:
        out, err = demo.communicate(timeout=110)
    document = json.loads(out)
    assert (demo.returncode, document["problems"], err) == (0, [], "")
    assert document["ok"] is True
    assert document["memory"] == memory
    totals = document["totals"]
    requests = {request["request"]: request for request in document["requests"]}
    assert totals["requests"] == totals["as_expected"] == len(requests) >= 12
    assert (totals["done"], totals["cancelled"], totals["failed"]) == (11, 1, 1)
    assert (totals["virtual"], totals["expired"]) == (3, 0)
    assert (totals["blocks_differing"], totals["tokens_differing"]) == (0, 0)
    assert totals["blocks_compared"] > 90
    assert totals["tokens"] == 8 * 12
    for request in requests.values():
        assert request["outcome"] == request["expected"]
        assert 0 <= request["finished_s"] <= request["seen_s"]
    check_rows(requests)
    assert left_behind(tmp_path) == []
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "demo" in name}


def check_rows(requests: dict[str, dict[str, Any]]) -> None:
    def row(name: str, *keys: str) -> tuple[Any, ...]:
        return tuple(requests[name][key] for key in keys)

    assert row("block", "prompt_tokens", "blocks", "blocks_sent", "layers") == (16, 1, 1, 10)
    assert row("cached", "cached_tokens", "blocks", "blocks_sent") == (96, 11, 5)
    assert row("all-cached", "reason", "nbytes", "tokens_equal") == ("nothing_to_fetch", 0, 12)
    assert row("cancelled", "reason", "layers", "tokens") == ("cancelled", 10, 0)
    assert row("broken", "reason", "layers", "tokens") == ("sender_failed", 6, 0)
    assert row("virtual-1", "reason", "nbytes", "layers") == ("virtual", 0, 0)


def test_too_late_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with start(tmp_path, "--json", "--timeout", "0.3") as demo:
        out, _ = demo.communicate(timeout=60)
    document = json.loads(out)
    assert demo.returncode == 1
    assert document["ok"] is False
    [problem] = document["problems"]
    assert problem.startswith("not at its end after 0.3 s: no outcome of short, block, ")
    assert "D ready" in problem
    assert left_behind(tmp_path) == []


def test_a_process_that_cannot_start_is_named_with_its_log(tmp_path: Path) -> None:
    config = tmp_path / "broken.yaml"
    config.write_text("link: {timeout_s: soon}")
    with start(tmp_path, "--config", str(config)) as demo:
        out, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "NOT AS IT SHOULD BE: the daemon process ended with code 2" in out
    assert "link.timeout_s" in out
    assert "\x1b" not in out
    assert left_behind(tmp_path) == ["broken.yaml"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(tmp_path: Path, number: int) -> None:
    with start(tmp_path) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("cancelled: P pauses"):
                break
        demo.send_signal(number)
        demo.communicate(timeout=60)
    assert demo.returncode == 128 + number
    assert left_behind(tmp_path) == []
