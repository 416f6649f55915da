"""Standard output as programs that show progress want it."""

from __future__ import annotations

import sys

from rich.console import Console

_PLAIN_WIDTH = 140


def make_console() -> Console:
    """A terminal as it is, anything else in plain text."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(
        highlight=False, force_terminal=False, no_color=True, color_system=None, width=_PLAIN_WIDTH
    )
