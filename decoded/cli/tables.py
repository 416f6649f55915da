"""A status report for the eye.

The report is shown as it comes, whatever its keys: single values as lines, lists of
maps as tables. A newer daemon's further keys are therefore shown too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STATE_STYLES = {
    "accepted": "cyan",
    "receiving": "blue",
    "draining": "yellow",
    "done": "green",
    "failed": "red",
    "cancelled": "magenta",
    "expired": "red",
}


def print_status(status: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a status report."""
    console = console or Console(highlight=False)
    _section(console, "", status)


def _section(console: Console, title: str, values: Mapping[str, Any]) -> None:
    lines = {key: value for key, value in values.items() if not _nested(value)}
    if lines:
        grid = Table.grid(padding=(0, 2))
        for key, value in lines.items():
            grid.add_row(Text(_words(key), style="dim"), _cell(key, value))
        if title:
            console.print(Text(title, style="bold"))
        console.print(grid)
        console.print()
    for key, value in values.items():
        name = f"{title}, {_words(key)}" if title else _words(key)
        if isinstance(value, Mapping) and value:
            _section(console, name, value)
        elif _nested(value):
            _table(console, name, value)


def _table(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(_words(column), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(column, row.get(column)) for column in columns))
    console.print(table)
    console.print()


def _cell(key: str, value: Any) -> Text:
    if value is None or value in ([], {}):
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no")
    if isinstance(value, float):
        return Text(f"{value:.3f}".rstrip("0").rstrip("."))
    if isinstance(value, int):
        return Text(f"{value:,}" if not key.endswith(("port", "pid", "generation")) else f"{value}")
    if isinstance(value, Mapping):
        return Text(", ".join(f"{name} {_cell(name, inner)}" for name, inner in value.items()))
    if isinstance(value, list):
        return Text(", ".join(str(_cell(key, item)) for item in value))
    # From a peer perhaps: no control characters on the terminal.
    text = "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value)
    )
    return Text(text, style=_STATE_STYLES.get(text, ""))


def _nested(value: Any) -> bool:
    """Whether a value gets a section or table of its own."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _words(key: str) -> str:
    return key.replace("_", " ")
