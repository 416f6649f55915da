"""`decoded doctor`: what this machine can run, tried for real, and the configuration for it."""

from __future__ import annotations

import argparse

from . import FAILED, OK, USAGE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--npu", action="store_true", help="try the Ascend NPUs: memory, sharing, Mooncake"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """0: an arrangement works. 1: none does. Each finding says what to do."""
    if not args.npu:
        print("decoded doctor: say what to look at: --npu")
        return USAGE
    from decoded.doctor.npu import examine
    from decoded.doctor.report import print_json, print_report

    findings = examine()
    (print_json if args.json else print_report)(findings)
    return OK if findings.good else FAILED
