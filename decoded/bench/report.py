"""What a bench prints: tables for people, one JSON document for machines, and the verdicts."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import zmq
from rich.console import Console
from rich.table import Table

from decoded import __version__

MICRO = 1e6


class Target(msgspec.Struct, frozen=True):
    """A bound that a measured value is held to. `bound`: whether it is an upper or a lower one."""

    what: str
    value: float
    bound: Literal["at most", "at least"]
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit if self.bound == "at most" else self.value >= self.limit


class Verdict(msgspec.Struct, frozen=True):
    """A target and whether it was met."""

    what: str
    value: float
    bound: Literal["at most", "at least"]
    limit: float
    passed: bool


class Machine(msgspec.Struct, frozen=True):
    """Where it ran. `load_1m`: the load average when it began; above 0 others were at work."""

    cpus: int
    load_1m: float
    system: str
    python: str
    decoded: str
    pyzmq: str
    libzmq: str


def machine() -> Machine:
    return Machine(
        cpus=len(os.sched_getaffinity(0)),
        load_1m=round(os.getloadavg()[0], 2),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        decoded=__version__,
        pyzmq=zmq.__version__,
        libzmq=zmq.zmq_version(),
    )


def judge(targets: Iterable[Target]) -> list[Verdict]:
    return [Verdict(t.what, t.value, t.bound, t.limit, t.passed) for t in targets]


def emit(
    document: msgspec.Struct, tables: Sequence[Table], notes: Sequence[str], json: bool
) -> None:
    """Print the document or the tables, on standard output."""
    if json:
        raw = msgspec.json.format(msgspec.json.encode(document), indent=2)
        sys.stdout.write(raw.decode() + "\n")
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        # A pipe or a file: rich would guess 80 columns and fold the rows.
        console.width = 200
    for note in notes:
        console.print(note, style="dim")
    for table in tables:
        console.print(table)


def exit_code(verdicts: Iterable[Verdict], check: bool) -> int:
    """1 for a missed target if it is to be checked, else 0."""
    return int(check and not all(verdict.passed for verdict in verdicts))


def table(title: str, *columns: str) -> Table:
    """A plain table whose columns but the first are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left")
    return made


def verdict_table(verdicts: Iterable[Verdict]) -> Table:
    made = table("targets", "what", "measured", "target", "")
    for verdict in verdicts:
        word = "[green]PASS[/]" if verdict.passed else "[red]FAIL[/]"
        made.add_row(
            verdict.what, f"{verdict.value:.2f}", f"{verdict.bound} {verdict.limit:g}", word
        )
    return made


def about(machine: Machine) -> str:
    return (
        f"{machine.cpus} CPUs, load {machine.load_1m}, {machine.system}, Python {machine.python}, "
        f"pyzmq {machine.pyzmq} (libzmq {machine.libzmq}), decoded {machine.decoded}"
    )


def spread(rounds: Sequence[float]) -> str:
    """The smallest and the largest of the rounds' ratios."""
    return f"{rounds[0]:.2f}..{rounds[-1]:.2f}"


def micro(seconds: float) -> str:
    return f"{seconds * MICRO:,.1f}"
