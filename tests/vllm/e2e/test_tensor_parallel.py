"""Two ranks on either side: the tokens of one engine with one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from decoded.cluster.check.questions import Size
from decoded.cluster.check.run import play
from decoded.cluster.check.scenarios import SCENARIOS, Scenario
from decoded.cluster.check.stage import Stage
from decoded.cluster.plan import Plan

from .conftest import OLDER, Run, staged

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(OLDER, reason="the older release is tested with one rank"),
]

CHOSEN = [one for one in SCENARIOS if one.name in ("batch", "second turn", "abort, mid-push")]


@pytest.fixture(scope="module")
def stage(run: Run, tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Stage]:
    plan = Plan(tiny, tp=2)
    folder = tmp_path_factory.mktemp("cluster")
    yield from staged(run, plan, folder, Size(crowd=1, virtual=1), replace(plan, tp=1))


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_it_is_as_it_should_be(scenario: Scenario, stage: Stage, run: Run) -> None:
    row = run(play(scenario, stage))
    assert row.problem == ""
