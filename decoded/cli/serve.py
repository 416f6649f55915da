"""`decoded serve`: run the daemon in the foreground until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import os
import sys

from . import CANNOT_START, USAGE
from .options import add_config_arguments, config_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser, "endpoint", "log_level", "log_format")


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    if config is None:
        return USAGE
    from decoded.config import unreadable_files, warnings
    from decoded.observe import log

    if unreadable := unreadable_files(config):
        print("\n".join(f"decoded: {problem}" for problem in unreadable), file=sys.stderr)
        return USAGE
    log.configure(config.log.level, config.log.format)
    import structlog

    from decoded.kv.wheel import WheelError, check_wheel

    logger = structlog.get_logger()
    for warning in warnings(config, os.environ):
        logger.warning("configuration", key=warning.path, problem=warning.text)
    try:
        check_wheel()
    except WheelError as error:
        logger.error("cannot start", why=str(error))
        return CANNOT_START
    from decoded.daemon import serve

    try:
        return serve(config)
    finally:
        log.flush()
