"""`decoded config`: the configuration as the daemon would take it, every key with its value; or
the JSON Schema of configurations.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from . import FAILED, OK, USAGE
from .completion import complete_with, files_or
from .options import add_config_arguments, overrides_of

_SCHEMA = "schema"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument(
        "what",
        nargs="?",
        metavar="FILE | schema",
        help="a file, the same as --config FILE; or the word schema: print the JSON Schema of "
        "configurations, for editors (a file of that name is ./schema)",
    )
    complete_with(what, files_or(_SCHEMA))
    add_config_arguments(parser, "endpoint", "log_level", "log_format")


def run(args: argparse.Namespace) -> int:
    """0: shown, secrets left out. 1: not valid. 2: flags that the schema has no use for."""
    overrides = overrides_of(args)
    if args.what != _SCHEMA:
        return _show(Path(args.what) if args.what else args.config, overrides)
    if overrides:
        print(f"decoded config schema: takes no {', '.join(overrides)}", file=sys.stderr)
        return USAGE
    from decoded.config.document import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return OK


def _show(path: Path | None, overrides: dict[str, str]) -> int:
    import yaml

    from decoded.config import (
        ConfigError,
        core_settings,
        load_config,
        transfer_environment,
    )

    try:
        config = load_config(path, overrides, os.environ)
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
