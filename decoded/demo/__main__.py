"""`python -m decoded.demo`: run the demo and say whether everything is as it should be."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import get_args

import decoded
from decoded.cli.console import make_console

from .run import Npus, run
from .scenario import Arrangement, make_batch
from .show import LiveView, PlainView, View, print_json, print_report
from .verify import Report

_CONFIG = Path(decoded.__file__).parents[1] / "configs" / "cpu.yaml"


def main() -> int:
    """The exit code: 0 if everything is as it should be, 1 if not."""
    args = _parse()
    console, view = make_console(), View()
    if not args.json:
        console.print(
            "Starting a daemon, a P process, a D engine and the single-process run to compare "
            f"with; KV memory: {args.memory}",
            soft_wrap=True,
        )
        terminal = console.is_terminal
        view = LiveView(console, make_batch()) if terminal else PlainView(console)
    caught: list[int] = []
    try:
        report = asyncio.run(_run(args, view, caught))
    except asyncio.CancelledError:
        return 128 + caught[0]
    if args.json:
        print_json(report)
    else:
        print_report(report, console)
    return 0 if report.ok else 1


async def _run(args: argparse.Namespace, view: View, caught: list[int]) -> Report:
    """Run it; a signal goes into `caught` and cancels it, so that its processes are ended."""
    task = asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        caught.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    npus = None if args.npu is None else Npus(*args.npu)
    return await run(args.config, args.memory, args.timeout, view, npus)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Run real and virtual requests through a daemon, a P process and a D engine, "
        "and check every byte and token. Exit code: 0 if all is as it should be, else 1.",
    )
    parser.add_argument(
        "--memory",
        choices=get_args(Arrangement),
        default="engine",
        help="whose KV memory D receives into: the engine's, shared with the daemon (default); "
        "the daemon's, mapped by the engine; or the engine's, which runs Mooncake itself",
    )
    parser.add_argument(
        "--npu",
        type=int,
        nargs=2,
        metavar=("D", "P"),
        help="keep D's and P's KV memory on these NPUs, and have Mooncake speak ascend",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="S",
        help="give up after this long (default: 120)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=_CONFIG,
        metavar="FILE",
        help="the daemon's configuration (default: configs/cpu.yaml)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
