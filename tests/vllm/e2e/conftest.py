"""Clusters of real engines, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import vllm

from decoded.cluster.check.questions import Size
from decoded.cluster.check.reference import collect
from decoded.cluster.check.stage import Stage
from decoded.cluster.cluster import Cluster
from decoded.cluster.model import tiny_model
from decoded.cluster.plan import Plan
from decoded.cluster.show import View

T = TypeVar("T")

OLDER = tuple(int(part) for part in vllm.__version__.split(".")[:2]) < (0, 32)
"""The release that is tested with less and a tiny model."""


class Run(Protocol):
    def __call__(self, job: Coroutine[Any, Any, T]) -> T: ...


@pytest.fixture(scope="package")
def run() -> Iterator[Run]:
    """Run a coroutine in the one loop that all of a cluster's life happens in."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="package")
def tiny() -> Path:
    return tiny_model()


def staged(
    run: Run, plan: Plan, folder: Path, size: Size, alone: Plan | None = None
) -> Iterator[Stage]:
    """A stage with a cluster by that plan, of whose P engines one runs.

    `alone`: of the engine that says what is right, if it is not the same plan.
    """
    view = View()
    reference = run(collect(alone or plan, size, folder, view))
    cluster = Cluster(plan, folder, view)
    run(cluster.__aenter__())
    try:
        run(cluster.start(p=1))
        yield Stage(cluster, reference, size)
    finally:
        run(cluster.__aexit__())
