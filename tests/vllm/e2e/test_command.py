"""scripts/cluster's program: it gets ready, it stops, and it says why it does not start."""

from __future__ import annotations

import os
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


def processes_of(group_leaders_in: Path) -> list[str]:
    """Processes that know of this folder, or were started by one that did."""
    return [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("TMPDIR") == str(group_leaders_in)
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_gets_ready_and_stops(tmp_path: Path, tiny: Path, number: int) -> None:
    with start(tmp_path, "--model", str(tiny)) as cluster:
        assert cluster.stdout is not None
        said = []
        for line in cluster.stdout:
            said.append(line)
            if line.startswith("Ctrl-C"):
                break
        text = "".join(said)
        assert "curl" in text, text
        assert len(processes_of(tmp_path)) > 4
        cluster.send_signal(number)
        cluster.communicate(timeout=60)
    assert cluster.returncode == 128 + number
    assert processes_of(tmp_path) == []
    assert not list(tmp_path.glob("decoded-cluster-*"))


def test_an_engine_that_cannot_start_is_named_with_its_log(tmp_path: Path, tiny: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with start(tmp_path, "--model", str(broken)) as cluster:
        out, _ = cluster.communicate(timeout=300)
    assert cluster.returncode == 1
    assert "1 ended with code 1; its log, " in out
    assert "safetensors" in out
    assert processes_of(tmp_path) == []
