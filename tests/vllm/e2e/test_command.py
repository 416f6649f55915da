"""scripts/cluster's program: it gets ready, it stops, and it says why it does not start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from .conftest import OLDER

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(OLDER, reason="the program is the same with either release"),
]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "decoded.cluster", *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_of(folder: Path) -> list[str]:
    """Processes that were started with this folder for temporary files, by whomever."""
    return [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("TMPDIR") == str(folder)
    ]


def said_until(cluster: subprocess.Popen[str], beginning: str) -> str:
    """All that it says, up to a line that begins like this."""
    assert cluster.stdout is not None
    said: list[str] = []
    for line in cluster.stdout:
        said.append(line)
        if line.startswith(beginning):
            break
    return "".join(said)


def test_it_gets_ready_answers_and_stops(tmp_path: Path, tiny: Path) -> None:
    with start(tmp_path, "--model", str(tiny)) as cluster:
        text = said_until(cluster, "Ctrl-C")
        [command] = [line for line in text.splitlines() if line.startswith("curl")]
        answer = subprocess.run(
            command, shell=True, capture_output=True, text=True, timeout=60, check=True
        )
        [choice] = json.loads(answer.stdout)["choices"]
        assert choice["message"]["role"] == "assistant"
        cluster.send_signal(signal.SIGINT)
        cluster.communicate(timeout=60)
    assert cluster.returncode == 128 + signal.SIGINT
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("decoded-cluster-*"))


def test_it_stops_while_it_starts(tmp_path: Path, tiny: Path) -> None:
    with start(tmp_path, "--model", str(tiny)) as cluster:
        said_until(cluster, "daemon: ready")
        cluster.send_signal(signal.SIGTERM)
        cluster.communicate(timeout=60)
    assert cluster.returncode == 128 + signal.SIGTERM
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("decoded-cluster-*"))


def test_an_engine_that_cannot_start_is_named_with_its_log(tmp_path: Path, tiny: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with start(tmp_path, "--model", str(broken)) as cluster:
        out, _ = cluster.communicate(timeout=300)
    assert cluster.returncode == 1
    assert re.search(r"[PD]1 ended with code 1: .*[Ss]afetensor.*; its log, ", out), out
    assert processes_of(tmp_path) == []
