"""What is shown of the acceptance: a line per scenario as it ends, and a table of all."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .verdict import Row


def print_row(row: Row, console: Console) -> None:
    """One scenario has ended."""
    verdict = Text("ok ", "green") if not row.problem else Text("NOT AS IT SHOULD BE ", "red")
    what = row.problem or row.found
    console.print(verdict + Text(f"{row.name}: {what} ({row.seconds:.1f} s)"), soft_wrap=True)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """All of them, with what each shows."""
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario")
    table.add_column("")
    table.add_column("shows")
    table.add_column("found", overflow="fold")
    table.add_column("s", justify="right")
    for row in rows:
        good = not row.problem
        table.add_row(
            row.name,
            Text("ok" if good else "FAILED", "green" if good else "red"),
            row.shows,
            Text(row.problem or row.found, "" if good else "red"),
            f"{row.seconds:.1f}",
        )
    console.print(table)


def summary(rows: Sequence[Row], planned: int, seconds: float) -> Text:
    """One line."""
    good = sum(not row.problem for row in rows)
    return Text(
        f"{good} of {planned} scenarios are as they should be. {seconds:.0f} s.",
        "green" if good == planned else "red",
    )
