"""`decoded config`: the configuration as the daemon would take it, every key with its value."""

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
    """0: shown, secrets left out. 1: not valid."""
    import yaml

    from decoded.config import (
        ConfigError,
        core_settings,
        load_config,
        transfer_environment,
    )

    try:
        config = load_config(args.file or args.config, overrides_of(args), os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return FAILED
    values = config.model_dump(mode="json")
    print(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), end="")
    settings = core_settings(config, os.environ)
    print(f"# A drain lasts {settings.drain_s:g} s: {settings.transfer_timeout_s:g} s that a write")
    print("# may last, and deadlines.drain_margin_s.")
    for name, value in transfer_environment(config, os.environ).items():
        print(f"# In the environment of Mooncake: {name}={value}")
    return OK
