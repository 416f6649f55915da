"""The collector's schedule."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from decoded.daemon import garbage


class Cycle:
    """Something that only a full collection finds, once it is old."""

    def __init__(self) -> None:
        self.myself = self


@pytest.fixture
def settings() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(("in_flight", "collected"), [(0, True), (garbage.FEW + 1, False)])
def test_old_garbage_is_collected_while_little_is_in_flight(
    in_flight: int, collected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "EVERY_S", 0.01)

    async def look_twice() -> bool:
        looks = asyncio.Semaphore(0)

        def count() -> int:
            looks.release()
            return in_flight

        collector = garbage.Collector(count)
        cycle = Cycle()
        gc.collect(1)
        gone = weakref.ref(cycle)
        del cycle
        for _ in range(2):
            await asyncio.wait_for(looks.acquire(), 10)
        collector.close()
        return gone() is None

    assert asyncio.run(look_twice()) is collected
