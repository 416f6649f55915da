"""`decoded status`: what the running daemon is doing, as tables or JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import NO_DAEMON, OK, USAGE
from .options import add_config_arguments, config_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the daemon's answer as JSON")
    parser.add_argument("--engine-id", metavar="ID", help="this engine only")
    parser.add_argument("--request-id", metavar="ID", help="this request's story too")
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="requests listed at most (default: 100)"
    )
    parser.add_argument(
        "--timeout", type=float, default=2.0, metavar="S", help="wait for an answer (default: 2)"
    )
    add_config_arguments(parser, "endpoint")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.limit <= 10_000 or not 0 < args.timeout <= 3_600:
        print("decoded status: --limit is 0 to 10000, --timeout 0 to 3600 s", file=sys.stderr)
        return USAGE
    config = config_of(args)
    if config is None:
        return USAGE
    from decoded.config import endpoint_of

    from .query import NoDaemonError, ask_status

    try:
        status = ask_status(
            endpoint_of(config, os.environ),
            engine_id=args.engine_id,
            request_id=args.request_id,
            limit=args.limit,
            timeout_s=args.timeout,
        )
    except NoDaemonError as error:
        print(f"decoded status: {error}", file=sys.stderr)
        return NO_DAEMON
    if args.json:
        print(json.dumps(status))
    else:
        from .tables import print_status

        print_status(status)
    return OK
