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
    """`what` was looked at, what was `found`, and what to do about it, if anything.

    `bad`: the daemon will not start or not work like this. `note`: it will, but read this.
    """

    grade: Grade
    what: str
    found: str
    remedy: str = ""


@dataclass
class Findings:
    """In the order in which they were made."""

    rows: list[Finding] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing is bad."""
        return all(row.grade != "bad" for row in self.rows)

    def ok(self, what: str, found: str) -> None:
        self.rows.append(Finding("ok", what, found))

    def note(self, what: str, found: str, remedy: str = "") -> None:
        self.rows.append(Finding("note", what, found, remedy))

    def bad(self, what: str, found: str, remedy: str) -> None:
        self.rows.append(Finding("bad", what, found, remedy))

    def conclusion(self) -> list[str]:
        """The lines below the table."""
        if self.good:
            return ["No problem was found."]
        problems = sum(row.grade == "bad" for row in self.rows)
        return [f"{problems} problem{'s' * (problems > 1)}; see → above."]


@dataclass
class NpuFindings(Findings):
    """`works`: kv_connector_extra_config's `memory`, or `kv.pool`, that were tried and work here;
    `settings`: the configuration that goes with them.
    """

    works: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """An arrangement of KV memory works."""
        return bool(self.works)

    def conclusion(self) -> list[str]:
        if not self.good:
            return ["No arrangement of KV memory works here; see above."]
        works = f"Works here: {', '.join(self.works)}. Set:"
        return [works, *(f"  {line}" for line in self.settings)]


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
    console.print()
    for line in findings.conclusion():
        console.print(line, markup=False)
