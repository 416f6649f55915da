"""`decoded proxy`: one OpenAI-compatible address before D and P engines."""

from __future__ import annotations

import argparse
import sys

from . import USAGE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decode",
        metavar="URL",
        nargs="+",
        action="extend",
        default=[],
        help="the D engines, http://host:port",
    )
    parser.add_argument(
        "--prefill",
        metavar="URL",
        nargs="+",
        action="extend",
        default=[],
        help="the P engines, http://host:port",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    parser.add_argument(
        "--advertise-url",
        metavar="URL",
        help="how D's daemons reach this proxy (default: the address it listens on)",
    )
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="mark every request virtual: D engines answer without any P engine",
    )
    parser.add_argument(
        "--prefill-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="how long a P engine may take (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info"
    )
    parser.add_argument("--log-format", choices=["auto", "console", "json"], default="auto")


def run(args: argparse.Namespace) -> int:
    from decoded.observe import log
    from decoded.proxy.settings import Settings

    settings = Settings(
        decode=tuple(args.decode),
        prefill=tuple(args.prefill),
        host=args.host,
        port=args.port,
        advertise_url=args.advertise_url,
        virtual=args.virtual,
        prefill_timeout_s=args.prefill_timeout,
    )
    if problems := settings.problems():
        print("\n".join(f"decoded proxy: {problem}" for problem in problems), file=sys.stderr)
        return USAGE
    log.configure(args.log_level, args.log_format)
    from decoded.proxy.serve import serve

    try:
        return serve(settings)
    finally:
        log.flush()
