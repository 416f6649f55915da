"""Whatever comes, memory stays bounded and the core keeps serving."""

from __future__ import annotations

import gc
import tracemalloc
from array import array

import pytest

from decoded.core import Core, CoreSettings, reasons
from decoded.core import events as ev
from decoded.core.request import RequestKey
from decoded.core.states import State

from .driver import SCHEDULER, Driver, key, refusals, started, worker


def test_requests_in_flight_are_bounded() -> None:
    d = Driver(max_requests=2)
    d.open()
    d.submit("a")
    d.submit("b")
    assert refusals(d.submit("c")) == [reasons.TOO_MANY_REQUESTS]
    d.cancel("a")
    assert started(d.submit("c")) == ["c"]


def test_unacknowledged_outcomes_are_bounded_and_the_silent_seat_is_named() -> None:
    d = Driver(max_unacknowledged=2)
    d.open(2)
    for name in ("a", "b"):
        d.submit(name)
        d.cancel(name)
        d.acknowledge(d.log.last)
        d.acknowledge(d.log.last, worker(0))
    effects = d.submit("c")
    assert refusals(effects) == [reasons.TOO_MANY_UNACKNOWLEDGED]
    assert "worker 1" in effects[0].detail  # type: ignore[union-attr]
    d.acknowledge(2, worker(1))
    assert started(d.submit("c")) == ["c"]


def test_senders_of_a_rank_are_bounded() -> None:
    d = Driver(max_senders_per_rank=3)
    d.open()
    d.begin()
    for number in range(100):
        d.done(f"p{number}", of=50)
        d.layers(0, sender=f"q{number}")
    progress = d.request().progress
    assert progress is not None
    assert len(progress[0].senders) == 3
    assert d.core.counters["sender_over_limit"] == 97 + 100


def test_a_sender_over_the_limit_does_not_raise_the_number_that_is_due() -> None:
    d = Driver(max_senders_per_rank=1)
    d.open()
    d.begin()
    d.layers(0, sender="p")
    d.done("stranger", of=60_000)
    d.done("p", of=1)
    assert d.outcome().state is State.DONE


@pytest.mark.parametrize(
    ("first", "count"), [(-1, 1), (0, 0), (0, -5), (0, 1_025), (1_024, 1), (2**60, 1), (1, 2**60)]
)
def test_layers_out_of_range_change_nothing(first: int, count: int) -> None:
    d = Driver()
    d.open()
    d.begin()
    d.layers(first, count)
    assert d.request().progress is None
    assert d.core.counters["layers_out_of_range"] == 1


def test_layers_are_a_set_and_repeats_leave_no_trace() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.layers(0, 3)
    d.layers(2, 2)
    for _ in range(50):
        d.layers(1)
    d.layers(1_023)
    progress = d.request().progress
    assert progress is not None
    sender = progress[0].senders["p"]
    assert sender.layers == 0b1111 | 1 << 1_023
    assert [(a.first, a.count) for a in sender.arrivals] == [(0, 3), (2, 2), (1_023, 1)]


def test_a_story_is_bounded() -> None:
    d = Driver(max_story=10)
    d.open()
    d.begin()
    d.cancel()
    for _ in range(100):
        d.cancel()
    assert len(d.core.story(key())) == 10


def test_tombstones_are_bounded_in_number() -> None:
    d = Driver(max_tombstones=3)
    d.open()
    for number in range(10):
        d.begin(str(number))
        d.done(external=f"x-{number}")
    assert [k.request_id for k in d.core.ledger.tombstones] == ["7", "8", "9"]
    assert [external for _, external in d.core.ledger.announced] == ["x-7", "x-8", "x-9"]


def test_tombstones_are_bounded_in_age() -> None:
    d = Driver(tombstone_age_s=10.0)
    d.open()
    d.begin()
    d.done()
    d.wait(10)
    assert d.core.story(key())
    d.wait(0.1)
    assert not d.core.story(key())
    assert not d.core.ledger.announced


def test_a_tombstone_holds_no_blocks() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    assert d.request().blocks == ()
    assert d.request().params == {}


def test_strays_for_unknown_requests_leave_nothing_but_a_count() -> None:
    d = Driver()
    d.open()
    for number in range(100):
        d.done(external=f"stray-{number}")
        d.failed(external=f"stray-{number}")
        d.layers(0, external=f"stray-{number}")
    assert d.core.counters["sender_early"] == 300
    assert not d.core.ledger.tombstones
    assert not d.core.ledger.announced


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    d = Driver()
    d.open()
    for _ in range(5_000):
        d.core.handle(ev.Submit(key(), "x", 1, (), 1, 0, True), d.now)
        d.core.handle(ev.Fulfilled(key(), 1, reasons.VIRTUAL), d.now)
        d.core.handle(ev.Acknowledged(SCHEDULER, d.log.log, d.log.last), d.now)
        d.core.handle(ev.Acknowledged(worker(0), d.log.log, d.log.last), d.now)
    d.core.check()
    assert d.core.counters["ended_done"] == 5_000
    assert len(d.core.deadlines) <= 1_025


def test_a_request_in_flight_with_64_blocks_takes_at_most_4_kib() -> None:
    core, count = Core(CoreSettings()), 20_000
    core.handle(ev.SessionOpened(ev.Seat("e", "scheduler", 0), "s", 1), 0.0)
    core.handle(ev.SessionOpened(ev.Seat("e", "worker", 0), "s", 1), 0.0)
    core.handle(ev.RankRegistered("e", 0, 1), 0.0)
    gc.collect()
    tracemalloc.start()
    for number in range(count):
        request, external = RequestKey("e", f"cmpl-{number}-0a1b2c3d"), f"cmpl-{number}"
        blocks = (array("q", range(number, number + 64)),)
        params = {"do_remote_prefill": True, "metaserver": f"http://proxy/{number}"}
        core.handle(ev.Submit(request, external, 1, blocks, 1_024, 0, False, params), 0.0)
        core.handle(ev.Started(request, 1, 1, 1), 0.0)
        core.handle(ev.LayersIn("e", 0, external, 1, "10.0.0.1:5000", 0, 1), 0.0)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(core.ledger.live) == count
    assert taken / count <= 4_096


def test_the_core_leaves_no_work_for_the_cycle_collector() -> None:
    """So a daemon may collect seldom: a full collection takes long with many in flight."""
    d = Driver(max_tombstones=5, tombstone_age_s=1.0)
    d.open(2)
    gc.collect()
    gc.disable()
    try:
        for number in range(300):
            external = f"x-{number}"
            d.begin(str(number))
            d.layers(0, external=external)
            for rank in range(2):
                (d.done, d.failed)[number % 2](rank=rank, external=external)
            d.submit(f"v{number}", virtual=True)
            d.cancel(f"v{number}")
            if number % 50 == 0:
                d.register(0)
        d.wait(400)
        d.effects.clear()
        assert gc.collect() == 0
    finally:
        gc.enable()
