"""The acceptance, scenario by scenario, in the order in which they play."""

from __future__ import annotations

from . import aborts, answers, faults, first_token, shapes, virtual
from .scenario import Scenario

SCENARIOS: tuple[Scenario, ...] = (
    *answers.SCENARIOS,
    *shapes.SCENARIOS,
    *first_token.SCENARIOS,
    *virtual.SCENARIOS,
    *aborts.SCENARIOS,
    *faults.SCENARIOS,
)

__all__ = ["SCENARIOS", "Scenario"]
