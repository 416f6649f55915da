"""How the demo's processes talk to the one that started them: a line of JSON each way."""

from __future__ import annotations

import json
import os
import threading
from typing import Any


class Parent:
    """The process that started this one, as seen from here. Made once, before anything prints.

    Libraries may print: the lines keep the pipe to themselves, and standard output becomes
    standard error.
    """

    def __init__(self) -> None:
        self._out = open(os.dup(1), "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        os.dup2(2, 1)
        # Unbuffered: a thread that waits in it holds no lock when the process ends.
        self._in = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
        self._lock = threading.Lock()

    def tell(self, what: str, **fields: Any) -> None:
        """Send one line; from any thread."""
        line = json.dumps({"what": what, **fields}) + "\n"
        with self._lock:
            self._out.write(line)

    def hear(self) -> dict[str, Any] | None:
        """The next line; blocks. None once the parent has closed the pipe, or died."""
        line = self._in.readline()
        if not line:
            return None
        message: dict[str, Any] = json.loads(line)
        return message
