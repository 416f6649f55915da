"""What the next request costs when many are in flight, and how much memory each takes."""

from __future__ import annotations

import gc
import tempfile
import time
from array import array
from statistics import median
from typing import Any

import msgspec
import psutil
from rich.table import Table

from decoded.core import Core, CoreSettings
from decoded.core import events as ev
from decoded.core.request import RequestKey

from . import report
from .dealer import Dealer
from .workload import daemon, free_endpoint, submissions

_BLOCKS = 64
_SAMPLES = 400
_ROUNDS = 5


class Scale(msgspec.Struct, frozen=True):
    """Costs are medians in seconds; `daemon_*` from submit to a heartbeat's return behind it."""

    few: int
    many: int
    daemon_few_s: float
    daemon_many_s: float
    core_few_s: float
    core_many_s: float
    bytes_per_request: float

    @property
    def daemon_ratio(self) -> float:
        return self.daemon_many_s / self.daemon_few_s

    @property
    def core_ratio(self) -> float:
        return self.core_many_s / self.core_few_s


def measure_scale(transport: str, many: int, few: int) -> Scale:
    """Two daemons, one with `few` and one with `many` requests in flight, asked in turns."""
    with tempfile.TemporaryDirectory(prefix="decoded-bench-") as folder:
        ends = [free_endpoint(transport, folder, f"scale-{n}.sock") for n in (0, 1)]
        sections: dict[str, dict[str, Any]] = {
            "virtual": {"delay": {"fixed_s": 3_600.0}},
            "limits": {"max_requests": 2 * many + 100_000},
            "deadlines": {"request_s": 7_200.0, "shutdown_s": 0.0},
        }
        with (
            daemon(ends[0], "warning", **sections),
            daemon(ends[1], "warning", **sections) as crowded,
            Dealer(ends[0], "few") as quiet_dealer,
            Dealer(ends[1], "many") as busy_dealer,
        ):
            _fill(quiet_dealer, few)
            process = psutil.Process(crowded.pid)
            _fill(busy_dealer, few)
            before = process.memory_info().rss
            _fill(busy_dealer, many - few)
            grown = process.memory_info().rss - before
            samples: tuple[list[float], list[float]] = ([], [])
            for _ in range(_ROUNDS):
                samples[0].extend(_next_costs(quiet_dealer))
                samples[1].extend(_next_costs(busy_dealer))
    core_few, core_many = _core_costs(few, many)
    return Scale(
        few,
        many,
        median(samples[0]),
        median(samples[1]),
        core_few,
        core_many,
        grown / max(many - few, 1),
    )


def scale_targets(scale: Scale) -> list[report.Target]:
    few, many = f"{scale.few:,}", f"{scale.many:,}"
    return [
        report.Target(
            f"next request at {many} / at {few} in flight", scale.daemon_ratio, "at most", 1.5
        ),
        report.Target(f"the same in the core at {many}", scale.core_ratio, "at most", 1.5),
        report.Target(
            f"KiB per request, {_BLOCKS} block ids", scale.bytes_per_request / 1024, "at most", 4.0
        ),
    ]


def scale_table(scale: Scale) -> Table:
    table = report.table("in flight", "what", f"at {scale.few:,}", f"at {scale.many:,}", "ratio")
    table.add_row(
        "submit and heartbeat, us",
        report.micro(scale.daemon_few_s),
        report.micro(scale.daemon_many_s),
        f"{scale.daemon_ratio:.2f}",
    )
    table.add_row(
        "submit in the core, us",
        report.micro(scale.core_few_s),
        report.micro(scale.core_many_s),
        f"{scale.core_ratio:.2f}",
    )
    table.add_row("daemon's memory per request, bytes", "", f"{scale.bytes_per_request:,.0f}", "")
    return table


def _fill(dealer: Dealer, count: int) -> None:
    for at in range(0, count, 1_024):
        dealer.submit(submissions(min(1_024, count - at), blocks=_BLOCKS))
        dealer.heartbeat(at + 1)


def _next_costs(dealer: Dealer) -> list[float]:
    clock, found = time.perf_counter, []
    for token, request in enumerate(submissions(_SAMPLES // _ROUNDS, blocks=_BLOCKS), 1):
        began = clock()
        dealer.submit([request])
        dealer.heartbeat(token)
        found.append(clock() - began)
    return found


def _core_costs(few: int, many: int) -> tuple[float, float]:
    """Median cost of one submit to the core alone, with `few` and with `many` in flight."""
    settings = CoreSettings(max_requests=2 * many + 100_000)
    found = []
    for count in (few, many):
        core = Core(settings)
        core.handle(ev.SessionOpened(ev.Seat("e", "scheduler", 0), "s", 1), 0.0)
        for event in _core_submits(0, count):
            core.handle(event, 0.0)
        # A collection in the middle would be measured as somebody's submit.
        gc.collect()
        gc.disable()
        costs = []
        for event in _core_submits(count, 2_000):
            began = time.perf_counter()
            core.handle(event, 0.0)
            costs.append(time.perf_counter() - began)
        gc.enable()
        found.append(median(costs))
    return found[0], found[1]


def _core_submits(first: int, count: int) -> list[ev.Submit]:
    return [
        ev.Submit(
            RequestKey("e", f"r{n}"),
            f"x{n}",
            1,
            (array("q", range(_BLOCKS)),),
            _BLOCKS * 16,
            0,
            True,
        )
        for n in range(first, first + count)
    ]
