"""How long a session waits, and for how long it keeps trying."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much a session keeps, in counts, and how long it waits, in seconds.

    `max_pending`: submissions without an outcome. `remember`: ids handed out, kept to
    tell what a restarted daemon reports again. `welcome_s`: for the answer to hello.
    `backoff_s` doubles up to `max_backoff_s`, each wait shortened at random by up to
    half. `patience_s`: how long a seat that is taken, or a registration that is lost,
    is tried for before callers get the error. `acknowledge_s`: how long an acknowledgement
    may be saved up: one for each outcome would compete with the requests that follow it.
    """

    max_pending: int = 1 << 18
    remember: int = 1 << 14
    welcome_s: float = 5.0
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    patience_s: float = 30.0
    acknowledge_s: float = 0.02


class Pace:
    """Waits that grow with each failure, and patience that ends.

    `failures`: how many there were since all was well. `jitter` returns numbers in 0..1.
    """

    def __init__(self, limits: Limits, jitter: Callable[[], float]) -> None:
        self.failures = 0
        self._limits = limits
        self._jitter = jitter
        self._refused_since: float | None = None

    def wait(self) -> float:
        """How long to wait before the next try, after `failures` of them."""
        limits = self._limits
        doublings = min(max(self.failures - 1, 0), 30)
        longest: float = min(limits.backoff_s * 2.0**doublings, limits.max_backoff_s)
        return longest * (1 - self._jitter() / 2)

    def refused(self, now: float) -> bool:
        """The daemon said no. True if that has lasted for too long."""
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self._limits.patience_s

    def accepted(self) -> None:
        """The daemon did not say no this time."""
        self._refused_since = None
