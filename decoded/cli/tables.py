"""A status report for the eye. docs/protocol.md describes its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Report = Mapping[str, Any]

_STYLES = {
    "accepted": "cyan",
    "receiving": "blue",
    "draining": "yellow",
    "done": "green",
    "failed": "red",
    "cancelled": "magenta",
    "expired": "red",
}


def print_status(status: Report, console: Console | None = None) -> None:
    """Print a status report: the daemon, its engines, its requests, what it has counted."""
    console = console or Console(highlight=False)
    console.print(_daemon(status))
    engines, requests = status.get("engines") or [], status.get("requests") or []
    if engines:
        console.print(_engines(engines))
    if requests:
        console.print(_requests(requests))
    for request in requests:
        if request.get("story"):
            console.print(_story(request))
    counters = {name: count for name, count in status.get("counters", {}).items() if count}
    if counters:
        console.print(_counters(counters))


def _daemon(status: Report) -> Table:
    grid = Table.grid(padding=(0, 2))
    states = status.get("states", {})
    rows = {
        "endpoint": status.get("endpoint"),
        "daemon": f"version {status.get('version')}, protocol {status.get('protocol')}, "
        f"pid {status.get('pid')}, boot {status.get('boot')}",
        "up": _duration(status.get("uptime_s")),
        "sessions": status.get("sessions"),
        "requests": ", ".join(f"{count} {state}" for state, count in states.items()) or "none",
        "metaserver calls": status.get("metaserver_calls"),
        "side channels": _listed(status.get("side_channel_ports") or []),
    }
    for name, value in rows.items():
        grid.add_row(Text(name, style="dim"), _text(value))
    if status.get("shutting_down"):
        grid.add_row("", Text("shutting down: takes no new requests", style="yellow"))
    return grid


def _engines(engines: Iterable[Report]) -> Table:
    table = _table("engines", "engine", "ready", "generation", "ranks", "memory", "seats")
    for name in ("in flight", "reported", "unacknowledged"):
        table.add_column(name, justify="right")
    for engine in engines:
        ranks, seats = engine.get("ranks", []), engine.get("seats", [])
        memory = [f"{rank['source']} {_bytes(rank['bytes'])}" for rank in ranks]
        away = [f"{s['role']} {s['rank']}" for s in seats if not s["connected"]]
        here = f"{len(seats) - len(away)} of {len(seats)}"
        draining = len(engine.get("draining_registrations", []))
        table.add_row(
            _text(engine["engine_id"]),
            "yes" if engine["ready"] else "no",
            _text(engine["generation"]),
            f"{len(ranks)} of {engine['world_size']}" + (f", {draining} draining" * bool(draining)),
            _listed(dict.fromkeys(memory)),
            here + (f", away: {_listed(away)}" if away else ""),
            _text(engine["in_flight"]),
            _text(engine["reported"]),
            _text(engine["unacknowledged"]),
        )
    return table


def _requests(requests: Iterable[Report]) -> Table:
    table = _table("requests", "request", "engine", "kind", "state", "reason", "senders")
    for name in ("layers", "tokens", "age", "left"):
        table.add_column(name, justify="right")
    for request in requests:
        senders = [sender for rank in request["ranks"] for sender in rank["senders"]]
        expected = [rank["expected_senders"] for rank in request["ranks"]]
        done = sum(sender["state"] == "done" for sender in senders)
        attempt = f" (attempt {request['attempt']})" if request["attempt"] > 1 else ""
        table.add_row(
            _text(request["request_id"] + attempt),
            _text(request["engine_id"]),
            "virtual" if request["virtual"] else "real",
            _text(request["state"]),
            _text(": ".join(filter(None, (request["reason"], request["detail"])))),
            f"{done} of {sum(expected) if all(expected) else '?'}" if request["ranks"] else "-",
            _layers(senders, request["layers"]),
            f"{request['prompt_tokens'] - request['cached_tokens']:,}",
            _duration(request["age_s"]),
            _duration(request["deadline_in_s"]),
        )
    return table


def _layers(senders: Iterable[Report], layers: int | None) -> Text:
    """The layers that all senders heard of so far have brought."""
    brought = [sender["layers_in"] for sender in senders]
    if not brought or layers is None:
        return Text("-", style="dim")
    return Text(f"{min(brought)} of {layers}")


def _story(request: Report) -> Table:
    table = _table(f"story of {request['request_id']}", "at", "what", "detail")
    for entry in request["story"]:
        table.add_row(f"{entry['at_s']:.4f} s", _text(entry["what"]), _text(entry["detail"]))
    for rank in request["ranks"]:
        for sender in rank["senders"]:
            what = f"rank {rank['rank']}, sender {sender['sender']}"
            of = f" of {request['layers']}" if request["layers"] else ""
            brought = f"{sender['layers_in']}{of} layers in, {sender['state']}"
            table.add_row("", _text(what), _text(brought))
    return table


def _counters(counters: Mapping[str, int]) -> Table:
    table = _table("counters", "what")
    table.add_column("times", justify="right")
    for name, count in sorted(counters.items()):
        table.add_row(_text(name.replace("_", " ")), f"{count:,}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=_text(title), title_justify="left", title_style="bold", box=None)
    table.pad_edge = False
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _text(value: Any) -> Text:
    """A cell. Ids come from peers: no control characters reach the terminal."""
    if value is None or value == "":
        return Text("-", style="dim")
    shown = f"{value:,}" if isinstance(value, int) and value > 9_999 else str(value)
    plain = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)
    return Text(plain, style=_STYLES.get(plain, ""))


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
