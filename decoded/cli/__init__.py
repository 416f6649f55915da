"""The `decoded` command: one module per subcommand, each imported only when it runs.

A subcommand's module has `add_arguments(parser)` and `run(args) -> int`. Importing
this package costs argparse and nothing more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from decoded import __version__

# name: (module, one line of help)
COMMANDS = {
    "serve": ("serve", "run the daemon"),
    "check-config": ("check_config", "check a configuration and say every error at once"),
    "config": ("show_config", "print the configuration that the daemon would take"),
    "status": ("status", "show what the running daemon is doing"),
    "submit": ("submit", "submit one request, wait for it and print its outcome"),
    "proxy": ("proxy", "run the proxy of a P/D cluster"),
    "bench": ("bench", "measure the data path or the control path"),
    "doctor": ("doctor", "try what this machine can run, and say what to do"),
    "completion": ("completion", "print what makes a shell complete this command's words"),
    "version": ("version", "print the versions of decoded and of what it runs on"),
}

# Exit codes. argparse uses 2 for usage as well.
OK = 0
FAILED = 1
USAGE = 2
NO_DAEMON = 3
CANNOT_START = 4
INTERRUPTED = 130

# Set by a shell that asks for words.
_COMPLETING = "_ARGCOMPLETE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv by default); returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if _COMPLETING in os.environ:
        from .completion import complete

        complete(_parser(arguments, whole=True))  # answers, and ends the process
    args = _parser(arguments).parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # `decoded status | head`: no second complaint when Python closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _parser(arguments: Sequence[str], whole: bool = False) -> argparse.ArgumentParser:
    """The parser; only the subcommand that `arguments` name is imported and filled in, unless
    the `whole` is wanted.
    """
    parser = argparse.ArgumentParser(
        prog="decoded",
        description="The decode-node daemon of a prefill/decode cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"decoded {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True, dest="command")
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if whole or name == named:
            loaded = importlib.import_module(f"decoded.cli.{module}")
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser
