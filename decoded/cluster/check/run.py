"""The acceptance from start to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from decoded.cluster.api import ApiError
from decoded.cluster.cluster import Cluster
from decoded.cluster.plan import Plan
from decoded.cluster.processes import ClusterError
from decoded.cluster.show import View

from .questions import Size
from .reference import collect
from .scenarios import Scenario
from .stage import Stage
from .verdict import Row, WrongError

P_ENGINES = 2
"""One to be killed, and one to go on with."""

_SCENARIO_S = 300.0


async def accept(
    plan: Plan,
    scenarios: Sequence[Scenario],
    size: Size,
    folder: Path,
    view: View,
    tell: Callable[[Row], None],
) -> list[Row]:
    """Play them one after the other; a row for each that was played.

    A process that ends by itself ends the acceptance; the last row has the problem. Raises
    ClusterError or ApiError if it does not get as far as the first.
    """
    plan = replace(plan, p=max(plan.p, P_ENGINES), policy="recompute")
    reference = await collect(plan, size, folder, view)
    rows: list[Row] = []
    async with Cluster(plan, folder, view) as cluster:
        await cluster.start(p=1)
        stage = Stage(cluster, reference, size)
        for scenario in scenarios:
            row = await play(scenario, stage)
            rows.append(row)
            tell(row)
            try:
                cluster.check()
            except ClusterError as error:
                row.problem = row.problem or str(error)
                break
    return rows


async def play(scenario: Scenario, stage: Stage) -> Row:
    """One scenario, after what it needs is there."""
    row = Row(scenario.name, scenario.shows, 0.0)
    try:
        await stage.want(scenario.policy, scenario.p)
        started = time.monotonic()
        try:
            row.found = await asyncio.wait_for(scenario.play(stage), _SCENARIO_S)
        finally:
            row.seconds = time.monotonic() - started
    except asyncio.TimeoutError:
        row.problem = f"not at its end after {_SCENARIO_S:g} s"
    except (WrongError, ApiError, ClusterError) as error:
        row.problem = str(error)
    return row
