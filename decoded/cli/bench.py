"""`decoded bench`: hands over to the benchmarks, which have options of their own."""

from __future__ import annotations

import argparse
import importlib


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("data", "control"),
        help="data: bandwidth of pushes through the daemon's path against Mooncake alone; "
        "control: latency and rate of requests against a bare ZMQ echo",
    )
    parser.add_argument(
        "options",
        nargs=argparse.REMAINDER,
        help="options of that benchmark: decoded bench data --help",
    )


def run(args: argparse.Namespace) -> int:
    benchmark = importlib.import_module(f"decoded.bench.{args.what}")
    code: int = benchmark.main(args.options)
    return code
