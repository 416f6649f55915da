"""scripts/cluster --check, scenario by scenario."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from decoded.cluster.check.questions import Size
from decoded.cluster.check.run import P_ENGINES, play
from decoded.cluster.check.scenarios import SCENARIOS, Scenario
from decoded.cluster.check.stage import Stage
from decoded.cluster.model import small_model
from decoded.cluster.plan import Plan

from .conftest import OLDER, Run, staged

# The first one starts the cluster, and waits for the answers of one engine alone.
pytestmark = pytest.mark.timeout(900)

SMALLER = {
    *("batch", "second turn", "short", "full hit", "list of prompts", "virtual crowd"),
    *("abort, mid-push", "P killed, recompute", "daemon killed, recompute"),
}
CHOSEN = [one for one in SCENARIOS if not OLDER or one.name in SMALLER]


@pytest.fixture(scope="module")
def stage(run: Run, tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stage]:
    plan = Plan(tiny if OLDER else small_model(), p=P_ENGINES)
    yield from staged(run, plan, tmp_path_factory.mktemp("cluster"), Size())


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_it_is_as_it_should_be(scenario: Scenario, stage: Stage, run: Run) -> None:
    row = run(play(scenario, stage))
    assert row.problem == ""
    assert row.found
