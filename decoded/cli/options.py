"""The options by which every command finds its configuration."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .completion import complete_with

if TYPE_CHECKING:
    from decoded.config import Config

# Flags that stand for one key; `--set` reaches all of them.
_NAMED = {
    "endpoint": ("link.endpoint", "URL", "the engine link: ipc:///path or tcp://host:port"),
    "log_level": ("log.level", "LEVEL", "debug, info, warning or error"),
    "log_format": ("log.format", "FORMAT", "auto, console or json"),
}


def add_config_arguments(parser: argparse.ArgumentParser, *named: str) -> None:
    """Add `--config`, `--set` and those of the named flags that the command has a use for."""
    group = parser.add_argument_group(
        "configuration",
        "In rising order: defaults, the file, DECODED_SECTION__KEY environment variables, flags.",
    )
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        default=Path(os.environ["DECODED_CONFIG"]) if os.environ.get("DECODED_CONFIG") else None,
        help="YAML file (default: $DECODED_CONFIG, else none)",
    )
    assignment = group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_assignment,
        help="one key, for instance link.timeout_s=5; may be repeated",
    )
    complete_with(assignment, _keys)
    for name in named:
        key, metavar, text = _NAMED[name]
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, metavar=metavar, help=f"{text} ({key})")


def overrides_of(args: argparse.Namespace) -> dict[str, str]:
    """What the flags say: dotted key to text."""
    overrides = dict(args.set)
    for name, (key, _, _) in _NAMED.items():
        if getattr(args, name, None) is not None:
            overrides[key] = getattr(args, name)
    return overrides


def config_of(args: argparse.Namespace) -> Config | None:
    """The configuration; None after its errors were printed."""
    from decoded.config import ConfigError, load_config

    try:
        return load_config(args.config, overrides_of(args), os.environ)
    except ConfigError as error:
        print(f"decoded: {error}", file=sys.stderr)
        return None


def _keys(prefix: str, **_: object) -> list[str]:
    """What may stand after `--set`, up to the `=`."""
    from decoded.config.sources import keys_at

    sections = keys_at(())
    return [f"{section}.{key}=" for section in sections for key in keys_at((section,))]


def _assignment(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is not KEY=VALUE")
    return key.strip(), value
