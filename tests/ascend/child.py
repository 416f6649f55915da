"""Programs in processes of their own, over the stand-in. They speak in lines of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Any

from .environ import environment

WAIT_S = 60.0
LEAVE_S = 10.0


class Child:
    """A program while it runs: "module.name", or a name of the module `programs`.

    `settings` are those of `environment`.
    """

    def __init__(self, program: str, *arguments: object, **settings: Any) -> None:
        module, _, name = program.rpartition(".")
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", f"tests.ascend.{module or 'programs'}", name),
                *map(str, arguments),
            ],
            env=environment(**settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            bufsize=1,
        )

    def tell(self, value: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(value), file=self._process.stdin, flush=True)

    def hear(self) -> Any:
        """What the program says next."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program ended with {self.wait()}:\n{self.errors()}"
        return json.loads(line)

    def ask(self, value: object) -> Any:
        self.tell(value)
        return self.hear()

    def wait(self) -> int:
        """Its exit code; that of one which a signal ended is negative."""
        return self._process.wait(WAIT_S)

    def errors(self) -> str:
        """What it wrote on standard error so far."""
        self._errors.seek(0)
        return self._errors.read()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Who ends by itself cleans up; only who does not is killed.
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(WAIT_S)
        for pipe in (self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()


def run(program: str, *arguments: object, **settings: Any) -> Any:
    """The one thing that a program says; it has to end well."""
    with Child(program, *arguments, **settings) as child:
        said = child.hear()
        assert child.wait() == 0, child.errors()
        return said
