"""What was found, and how it is shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Grade = Literal["ok", "note", "bad"]
_STYLES: dict[Grade, str] = {"ok": "green", "note": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Finding:
    """`what` was looked at, what was `found`, and what to do about it, if anything."""

    grade: Grade
    what: str
    found: str
    remedy: str = ""


@dataclass
class Findings:
    """In the order in which they were made. `works`: kv_connector_extra_config's `memory`, or
    `kv.pool`, that were tried and work here; `settings`: the configuration that goes with them.
    """

    rows: list[Finding] = field(default_factory=list)
    works: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """An arrangement of KV memory works."""
        return bool(self.works)

    def ok(self, what: str, found: str) -> None:
        self.rows.append(Finding("ok", what, found))

    def note(self, what: str, found: str, remedy: str = "") -> None:
        self.rows.append(Finding("note", what, found, remedy))

    def bad(self, what: str, found: str, remedy: str) -> None:
        self.rows.append(Finding("bad", what, found, remedy))


def print_json(findings: Findings) -> None:
    Console().print_json(data={**asdict(findings), "good": findings.good})


def print_report(findings: Findings) -> None:
    console = Console(soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found"):
        table.add_column(heading)
    for row in findings.rows:
        text = Text(row.found + (f"\n→ {row.remedy}" if row.remedy else ""))
        table.add_row(Text(row.grade, style=_STYLES[row.grade]), Text(row.what), text)
    console.print(table)
    if findings.good:
        console.print(f"\nWorks here: {', '.join(findings.works)}. Set:", markup=False)
        for line in findings.settings:
            console.print(f"  {line}", markup=False)
    else:
        console.print("\nNo arrangement of KV memory works here; see above.", markup=False)
