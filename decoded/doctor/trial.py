"""Trials are processes of their own, which may die of what they try."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

ERROR = "error: "
_TRIAL_S = 180.0


def run_trial(module: str, *arguments: object) -> Any:
    """What `python -m module arguments` prints as JSON, or why it failed, as a sentence."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TRIAL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing came of it in {_TRIAL_S:g} s"
    answer = done.stdout.strip().splitlines()
    if done.returncode == 0 and answer:
        return json.loads(answer[-1])
    return why(done)


def why(ended: subprocess.CompletedProcess[str]) -> str:
    """Why a trial failed: what it said, or else the last that anything in it did."""
    lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    return (said or lines or [f"it ended with code {ended.returncode}"])[-1][:300]
