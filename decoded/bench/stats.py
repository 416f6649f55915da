"""Samples of rounds that take turns, and what is told of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

import msgspec

T = TypeVar("T")
Rounds = Sequence[Sequence[float]]


class Ratio(msgspec.Struct, frozen=True):
    """How two things that were measured in turns compare.

    `value`: of the medians over everything. `rounds`: of each round's medians, smallest
    first: how far they spread tells how quiet the machine was.
    """

    value: float
    rounds: list[float]


class Timing(msgspec.Struct, frozen=True):
    """Durations in seconds, over all rounds."""

    p50_s: float
    p99_s: float
    samples: int


def take_turns(rounds: int, *measures: Callable[[], T]) -> list[list[T]]:
    """Run each measure once per round; the results of each, by round.

    Every second round runs backwards, so that a machine that grows slower or faster
    meanwhile does it to all of them alike.
    """
    results: list[list[T]] = [[] for _ in measures]
    order = list(range(len(measures)))
    for _ in range(rounds):
        for which in order:
            results[which].append(measures[which]())
        order.reverse()
    return results


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(fraction * len(ordered)) - 1, 0)]


def timing(rounds: Rounds) -> Timing:
    values = [value for samples in rounds for value in samples]
    return Timing(median(values), percentile(values, 0.99), len(values))


def ratio(ours: Rounds, baseline: Rounds) -> Ratio:
    """Our medians over the baseline's."""
    value = _median(ours) / _median(baseline)
    by_round = (median(a) / median(b) for a, b in zip(ours, baseline, strict=True))
    return Ratio(value, sorted(by_round))


def rate_ratio(ours: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """The same for one number per round."""
    return ratio([[value] for value in ours], [[value] for value in baseline])


def _median(rounds: Rounds) -> float:
    return median(value for samples in rounds for value in samples)
