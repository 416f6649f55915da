"""What the demo shows: live bars or plain lines, then a table; or one JSON document."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from .scenario import Request
from .shape import SHAPE
from .verify import Report, Row

_STYLES = {"done": "green", "failed": "red", "cancelled": "magenta", "draining": "yellow"}


class View:
    """What is shown while the batch runs. This one shows nothing."""

    def note(self, text: str) -> None:
        """Something worth a line has happened."""

    def progress(self, external_id: str, state: str, layers: int) -> None:
        """The daemon has a request in this state, and so many of its layers are in."""

    def ended(self, external_id: str, state: str, reason: str, seconds: float) -> None:
        """A request has its outcome."""

    def close(self) -> None:
        """Nothing more comes."""


class PlainView(View):
    """One line per event, for where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def ended(self, external_id: str, state: str, reason: str, seconds: float) -> None:
        self.note(f"{external_id}: {state} ({reason}) after {seconds * 1000:.1f} ms")


class LiveView(View):
    """A bar per request."""

    def __init__(self, console: Console, batch: Sequence[Request]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            TextColumn("[dim]{task.fields[kind]}"),
            BarColumn(bar_width=SHAPE.layers * 2),
            TextColumn("{task.fields[layers]}", justify="right"),
            TextColumn("{task.fields[state]}"),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {
            request.external_id: self._progress.add_task(
                request.external_id,
                total=SHAPE.layers,
                kind=request.kind,
                layers="",
                state="",
            )
            for request in batch
        }
        self._ended: set[str] = set()
        self._pushed = {request.external_id for request in batch if request.pushed}
        self._progress.start()

    def note(self, text: str) -> None:
        self._progress.console.print(text, markup=False, style="dim")

    def progress(self, external_id: str, state: str, layers: int) -> None:
        if external_id not in self._tasks or external_id not in self._pushed:
            return
        task = self._tasks[external_id]
        layers = max(layers, int(self._progress.tasks[task].completed))
        self._progress.update(task, completed=layers, layers=f"{layers} of {SHAPE.layers} layers")
        if external_id not in self._ended:
            self._progress.update(task, state=state)

    def ended(self, external_id: str, state: str, reason: str, seconds: float) -> None:
        self._ended.add(external_id)
        if state == "done":
            self.progress(external_id, state, SHAPE.layers)
            self._progress.update(self._tasks[external_id], completed=SHAPE.layers)
        text = f"[{_STYLES.get(state, 'red')}]{state}[/] after {seconds * 1000:.1f} ms"
        self._progress.update(self._tasks[external_id], state=text)

    def close(self) -> None:
        self._progress.stop()


def print_report(report: Report, console: Console) -> None:
    """The table, what is wrong, and the summary."""
    if report.rows:
        console.print(_table(report.rows))
    for problem in report.all_problems:
        console.print(Text(f"NOT AS IT SHOULD BE: {problem}", style="red"), soft_wrap=True)
    console.print(Text(_summary(report), style="green" if report.ok else "red"), soft_wrap=True)


def print_json(report: Report) -> None:
    """The same as one JSON document."""
    document = {
        "ok": report.ok,
        "memory": report.memory,
        "seconds": round(report.seconds, 3),
        "problems": report.all_problems,
        "totals": _totals(report.rows),
        "requests": [dataclasses.asdict(row) for row in report.rows],
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("request", "kind", "outcome"):
        table.add_column(name)
    for name in ("blocks", "bytes", "layers", "finished after"):
        table.add_column(name, justify="right")
    for name in ("KV against P's", "tokens"):
        table.add_column(name)
    for row in rows:
        good = not row.problems
        table.add_row(
            row.request,
            row.kind,
            Text(row.outcome, style=_STYLES.get(row.outcome, "red")),
            f"{row.blocks_sent} of {row.blocks}",
            f"{row.nbytes:,}",
            f"{row.layers} of {SHAPE.layers}" if row.nbytes else "-",
            f"{row.finished_s * 1000:,.1f} ms",
            Text(_kv(row), style="" if good else "red"),
            f"{row.tokens_equal} of {row.tokens} equal" if row.tokens else "-",
        )
    return table


def _kv(row: Row) -> str:
    if row.problems:
        return "see below"
    if not row.blocks_compared:
        return "untouched"
    if row.outcome == "failed":
        return f"{row.layers} layers equal"
    return f"{row.blocks_compared} equal"


def _totals(rows: Sequence[Row]) -> dict[str, int]:
    states = Counter(row.outcome for row in rows)
    return {
        "requests": len(rows),
        "as_expected": sum(not row.problems for row in rows),
        "virtual": sum(row.virtual for row in rows),
        **{state: states[state] for state in ("done", "failed", "cancelled", "expired")},
        "bytes": sum(row.nbytes for row in rows),
        "blocks_compared": sum(row.blocks_compared for row in rows),
        "blocks_differing": sum(row.blocks_differing for row in rows),
        "tokens": sum(row.tokens for row in rows),
        "tokens_differing": sum(row.tokens - row.tokens_equal for row in rows),
    }


def _summary(report: Report) -> str:
    totals = _totals(report.rows)
    if not report.rows:
        return f"The demo failed after {report.seconds:.1f} s."
    return (
        f"{totals['as_expected']} of {totals['requests']} requests are as they should be: "
        f"{totals['done']} done ({totals['virtual']} of them virtual), "
        f"{totals['cancelled']} cancelled, {totals['failed']} failed. "
        f"{totals['blocks_compared']} blocks compared with P's, {totals['blocks_differing']} "
        f"differ; {totals['tokens']} tokens compared with the single-process run's, "
        f"{totals['tokens_differing']} differ. {report.seconds:.1f} s."
    )
