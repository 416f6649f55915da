"""How a scenario says that something is not as it should be, and what is said of all."""

from __future__ import annotations

from dataclasses import dataclass


class WrongError(Exception):
    """Something is not as it should be; the text says what."""


def expect(holds: bool, otherwise: str) -> None:
    """Raises WrongError with that text unless it holds."""
    if not holds:
        raise WrongError(otherwise)


@dataclass
class Row:
    """What came of a scenario. `problem` is empty if all is as it should be."""

    name: str
    shows: str
    seconds: float
    found: str = ""
    problem: str = ""
