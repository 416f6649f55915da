"""How a test's process speaks with the test: lines of JSON, on standard output and input."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


def _take_standard_output() -> TextIO:
    """Standard output for this module alone: torch_npu prints some of its errors there."""
    voice = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return voice


VOICE = _take_standard_output()


def say(value: object) -> None:
    print(json.dumps(value), file=VOICE, flush=True)


def heard() -> Any:
    """What the test says next; "end" when it says no more."""
    line = sys.stdin.readline()
    return json.loads(line) if line else "end"
