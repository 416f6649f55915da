"""`decoded bench control`: what the daemon adds to a message's way, and how many it carries.

Everything is measured in turns with a bare ZMQ echo in the same run, so that the ratios
hold whatever the machine is busy with.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import msgspec
from rich.table import Table

from decoded.client import Client
from decoded.observe import log
from decoded.wire import link as wire

from . import report
from .dealer import Dealer
from .echo import Echo
from .finish import Finisher
from .scale import Scale, measure_scale, scale_table, scale_targets
from .stats import Ratio, Timing, rate_ratio, ratio, take_turns, timing
from .workload import daemon, free_endpoint, message_bytes, submissions

IN_FLIGHT = (1, 64, 1_024)


class Latency(msgspec.Struct, frozen=True):
    """One kind of round trip. `ratio`: to the bare echo's, of the medians."""

    what: str
    timing: Timing
    ratio: Ratio | None


class Rate(msgspec.Struct, frozen=True):
    """Requests per second at a number in flight, and the echo's messages per second."""

    what: str
    in_flight: int
    requests_per_s: float
    echo_per_s: float
    ratio: Ratio


class Document(msgspec.Struct, frozen=True):
    """What `--json` prints. Times in seconds, rates per second."""

    machine: report.Machine
    transport: str
    log_level: str
    echo_message_bytes: int
    latencies: list[Latency]
    rates: list[Rate]
    scale: Scale | None
    verdicts: list[report.Verdict]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and with `--check` exit 1 for a missed target."""
    args = _parser().parse_args(argv)
    log.configure("warning")
    machine = report.machine()
    with tempfile.TemporaryDirectory(prefix="decoded-bench-") as folder:
        endpoint = free_endpoint(args.transport, folder, "link.sock")
        echo_endpoint = free_endpoint(args.transport, folder, "echo.sock")
        with (
            daemon(endpoint, args.log_level),
            Echo(echo_endpoint, message_bytes()) as echo,
            Dealer(endpoint, "bench-dealer") as dealer,
            Client(endpoint, "bench-client") as client,
            Finisher(endpoint, "bench-real") as finisher,
        ):
            client.wait_connected(10)
            latencies = _latencies(args, echo, dealer, client, finisher)
            rates = _rates(args, echo, dealer, finisher)
    scale = measure_scale(args.transport, args.many, args.few) if args.scale else None
    targets = [*_targets(latencies, rates), *(scale_targets(scale) if scale else [])]
    document = Document(
        machine=machine,
        transport=args.transport,
        log_level=args.log_level,
        echo_message_bytes=message_bytes(),
        latencies=latencies,
        rates=rates,
        scale=scale,
        verdicts=report.judge(targets),
    )
    report.emit(document, _tables(document), _notes(document), args.json)
    return report.exit_code(document.verdicts, args.check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="decoded bench control",
        description="Latency and rate of requests, in turns with a bare ZMQ echo.",
    )
    parser.add_argument("--transport", choices=("ipc", "tcp"), default="ipc")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each measure")
    parser.add_argument("--samples", type=int, default=400, help="round trips per turn")
    parser.add_argument("--requests", type=int, default=16_384, help="requests per turn of a rate")
    parser.add_argument("--log-level", choices=("info", "warning"), default="warning")
    parser.add_argument("--no-scale", dest="scale", action="store_false")
    parser.add_argument("--many", type=int, default=100_000, help="requests in flight for scale")
    parser.add_argument("--few", type=int, default=1_000, help="what they are compared with")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", action="store_true")
    return parser


def _latencies(
    args: argparse.Namespace, echo: Echo, dealer: Dealer, client: Client, finisher: Finisher
) -> list[Latency]:
    count = args.samples
    # One turn of each beforehand: connections, caches and allocations settle.
    take_turns(
        1,
        partial(echo.latencies, count),
        lambda: dealer.latencies(submissions(count)),
        lambda: client_latencies(client, submissions(count)),
        partial(finisher.latencies, count // 4 + 1),
    )
    baseline, bare, library, real = take_turns(
        args.rounds,
        partial(echo.latencies, count),
        lambda: dealer.latencies(submissions(count)),
        lambda: client_latencies(client, submissions(count)),
        partial(finisher.latencies, count // 4 + 1),
    )
    return [
        Latency("bare echo, round trip", timing(baseline), None),
        Latency("virtual, bare DEALER: submit to finished", timing(bare), ratio(bare, baseline)),
        Latency(
            "virtual, synchronous client: submit to finished",
            timing(library),
            ratio(library, baseline),
        ),
        Latency("real: DONE to finished", timing(real), ratio(real, baseline)),
    ]


def client_latencies(client: Client, requests: Sequence[wire.Submission]) -> list[float]:
    """Submit to outcome of each request alone, in seconds, as an engine that waits sees it."""
    clock, found = time.perf_counter, []
    for request in requests:
        began = clock()
        client.submit(request)
        ended = client.wait(30)
        found.append(clock() - began)
        if len(ended) != 1 or ended[0].state != "done":
            raise RuntimeError(f"a request did not end as done: {ended}")
    return found


def _rates(args: argparse.Namespace, echo: Echo, dealer: Dealer, finisher: Finisher) -> list[Rate]:
    rates = []
    for in_flight in IN_FLIGHT:
        # With one in flight a turn would take as long as all others together.
        count = args.requests if in_flight > 1 else max(args.requests // 8, 1)
        # Each real request takes a local port for a minute: that of its metaserver call.
        real_count = max(min(count // 8, 512), 1)
        base, virtual, real = take_turns(
            max(args.rounds // 2, 1),
            partial(echo.rate, in_flight, count),
            lambda n=in_flight, c=count: dealer.rate(n, submissions(c)),  # type: ignore[misc]
            partial(finisher.rate, in_flight, real_count),
        )
        for what, ours in (("virtual", virtual), ("real, from DONE", real)):
            rates.append(
                Rate(
                    what,
                    in_flight,
                    median(ours),
                    median(base),
                    rate_ratio(ours, base),
                )
            )
    return rates


def _targets(latencies: Sequence[Latency], rates: Sequence[Rate]) -> list[report.Target]:
    bare, library = latencies[1].ratio, latencies[2].ratio
    busiest = next(rate for rate in rates if rate.what == "virtual" and rate.in_flight == 1_024)
    if bare is None or library is None:
        raise AssertionError("only the echo has no ratio")
    return [
        report.Target("virtual p50, bare DEALER / echo", bare.value, "at most", 2.0),
        report.Target("virtual p50, synchronous client / echo", library.value, "at most", 4.0),
        report.Target(
            "virtual rate at 1,024 in flight / echo", busiest.ratio.value, "at least", 0.5
        ),
    ]


def _tables(document: Document) -> list[Table]:
    times = report.table("round trips", "what", "p50 us", "p99 us", "ratio", "by round")
    for each in document.latencies:
        times.add_row(
            each.what,
            report.micro(each.timing.p50_s),
            report.micro(each.timing.p99_s),
            "" if each.ratio is None else f"{each.ratio.value:.2f}",
            "" if each.ratio is None else report.spread(each.ratio.rounds),
        )
    rates = report.table("rates", "what", "in flight", "requests/s", "echo/s", "ratio", "by round")
    for rate in document.rates:
        rates.add_row(
            rate.what,
            f"{rate.in_flight:,}",
            f"{rate.requests_per_s:,.0f}",
            f"{rate.echo_per_s:,.0f}",
            f"{rate.ratio.value:.2f}",
            report.spread(rate.ratio.rounds),
        )
    scale = [scale_table(document.scale)] if document.scale is not None else []
    return [times, rates, *scale, report.verdict_table(document.verdicts)]


def _notes(document: Document) -> list[str]:
    return [
        report.about(document.machine),
        f"{document.transport}, daemon's log level {document.log_level}, "
        f"echo of {document.echo_message_bytes} bytes",
    ]
