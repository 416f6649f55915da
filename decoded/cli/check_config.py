"""`decoded check-config`: say all that is wrong with a configuration, or that nothing is."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import FAILED, OK
from .options import add_config_arguments, overrides_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=Path, help="the same as --config FILE")
    add_config_arguments(parser, "endpoint", "log_level", "log_format")


def run(args: argparse.Namespace) -> int:
    """0: valid, perhaps with warnings. 1: not valid."""
    from decoded.config import ConfigError, load_config, unreadable_files, warnings

    path = args.file or args.config
    try:
        config = load_config(path, overrides_of(args), os.environ)
        if unreadable := unreadable_files(config):
            raise ConfigError(unreadable)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return FAILED
    for warning in warnings(config, os.environ):
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{path or 'the configuration without a file'} is valid")
    return OK
