"""`decoded doctor --npu`: the command for the operator's hardware, over the stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .environ import environment


def doctor(**settings: Any) -> tuple[int, dict[str, Any]]:
    said = subprocess.run(  # noqa: PLW1510 (the code is what is asked for)
        [sys.executable, "-m", "decoded", "doctor", "--npu", "--json"],
        env=environment(**settings),
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    report: dict[str, Any] = json.loads(said.stdout)
    return said.returncode, report


def test_every_arrangement_is_tried() -> None:
    code, report = doctor(devices=2)
    assert [row for row in report["rows"] if row["grade"] == "bad"] == []
    tried = [row["what"] for row in report["rows"] if "every byte compared" in row["found"]]
    assert tried == [
        "NPU 0: Mooncake to itself",
        "NPU 1: Mooncake to itself",
        "NPU 0 to NPU 1: Mooncake",
        "NPU 0: shared with a process",
        "NPU 1: shared with a process",
    ]
    assert [each.split()[0] for each in report["works"]] == ["transfer", "shared", "pool"]
    assert (code, report["good"]) == (0, True)


@pytest.mark.parametrize("fault", ["refuse", "fail"])
def test_what_does_not_work_is_not_recommended(fault: str) -> None:
    code, report = doctor(devices=1, fault=fault)
    bad = [row for row in report["rows"] if row["grade"] == "bad"]
    assert [row["what"] for row in bad] == [
        "NPU 0: Mooncake to itself",
        "NPU 0: shared with a process",
    ]
    assert all("failed" in row["found"] and row["remedy"] for row in bad)
    assert (code, report["works"]) == (1, [])
