from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from .engines import WAIT_S, Cluster

Story = Callable[[Cluster], Awaitable[None]]


@pytest.fixture
def run() -> Callable[..., None]:
    """`run(story, ...)`: what happens to a cluster, in a loop of its own and bounded in time."""

    def runner(story: Story, **options: Any) -> None:
        async def whole() -> None:
            cluster = Cluster()
            try:
                await cluster.start(**options)
                await asyncio.wait_for(story(cluster), WAIT_S)
                assert cluster.proxy.legs_open == 0
            finally:
                await cluster.close()

        uvloop.run(whole())

    return runner
