"""The demo's batch with KV memory on two NPUs: every block and token compared."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .environ import environment

ARRANGEMENTS = ["engine", "daemon", "transfer"]


def demo(memory: str, *python: str, **settings: Any) -> tuple[int, Any]:
    """Its exit code and its report."""
    program = python or ("-m", "decoded.demo")
    said = subprocess.run(  # noqa: PLW1510 (the code is what is asked for)
        [sys.executable, *program, "--npu", "0", "1", "--json", "--memory", memory],
        env=environment(devices=2, **settings),
        stdout=subprocess.PIPE,
        text=True,
        timeout=180,
    )
    report = json.loads(said.stdout)
    assert isinstance(report, dict)
    return said.returncode, report


@pytest.mark.parametrize("memory", ARRANGEMENTS)
def test_every_request_ends_as_it_should(memory: str) -> None:
    code, report = demo(memory)
    assert report["problems"] == []
    assert [each["problems"] for each in report["requests"]] == [[]] * 13
    assert (code, report["ok"]) == (0, True)
    assert report["totals"]["blocks_compared"] >= 90
    assert report["totals"]["virtual"] == 3
