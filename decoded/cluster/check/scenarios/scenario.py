"""What a scenario is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from decoded.cluster.check.stage import Stage
from decoded.cluster.plan import Policy


@dataclass(frozen=True)
class Scenario:
    """`play` raises WrongError, ApiError or ClusterError if something is not as it should be,
    and returns what it found otherwise.

    `shows`: what that proves. `policy`: of the D engines. `p`: P engines that have to run at
    the beginning, at least. `real`: only a model that knows something can pass.
    """

    name: str
    shows: str
    play: Callable[[Stage], Awaitable[str]]
    policy: Policy = "recompute"
    p: int = 1
    real: bool = False
