"""`decoded doctor`: what this machine can run, tried for real, and what to do about the rest."""

from __future__ import annotations

import argparse
import os

from . import FAILED, OK, USAGE
from .options import add_config_arguments, config_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code: 0 no problem, 1 a problem (with --npu: no arrangement of KV memory works), "
        "2 usage, or the configuration is wrong."
    )
    parser.add_argument(
        "--npu",
        action="store_true",
        help="try the Ascend NPUs instead: memory, sharing, Mooncake",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_arguments(parser, "endpoint")


def run(args: argparse.Namespace) -> int:
    """Each finding says what to do."""
    from decoded.doctor.report import Findings, print_json, print_report

    findings: Findings
    if args.npu:
        from decoded.doctor import npu

        findings = npu.examine()
    else:
        config = config_of(args)
        if config is None:
            return USAGE
        from decoded.config import endpoint_of
        from decoded.doctor import node

        from .query import NoDaemonError, ask_status

        try:
            running = ask_status(endpoint_of(config, os.environ), limit=0)
        except NoDaemonError:
            running = None
        findings = node.examine(config, os.environ, running)
    (print_json if args.json else print_report)(findings)
    return OK if findings.good else FAILED
