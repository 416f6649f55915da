"""Blocks and registrations go back only when nobody can write to them any more."""

from __future__ import annotations

import pytest

from decoded.core import events as ev
from decoded.core import reasons
from decoded.core.effects import Fence, Report, Stop
from decoded.core.states import State

from .driver import ENGINE, Driver, key, only, released, stopped, worker


def test_cancel_before_anybody_was_told_ends_at_once() -> None:
    d = Driver()
    d.open()
    d.submit()
    effects = d.cancel()
    assert [type(effect) for effect in effects] == [Report, Stop]
    assert d.outcome().state is State.CANCELLED


def test_cancel_during_a_push_waits_until_every_writer_has_spoken() -> None:
    d = Driver()
    d.open(2)
    d.begin()
    d.done("p1", rank=0)
    assert not d.cancel()
    assert not d.failed("p1", rank=0)
    assert d.state() is State.DRAINING
    assert stopped(d.done("p2", rank=1)) == ["r"]
    assert d.outcome().state is State.CANCELLED


def test_one_failed_handle_waits_for_its_siblings() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.failed("p1", of=3)
    d.done("p2", of=3)
    assert d.state() is State.DRAINING
    d.failed("p3", of=3)
    assert d.outcome().state is State.FAILED


def test_a_drain_lasts_from_the_last_moment_a_writer_may_begin() -> None:
    d = Driver(prefill_timeout_s=100.0, transfer_timeout_s=20.0, drain_margin_s=2.0)
    d.open()
    d.begin()
    d.wait(10)
    d.cancel()
    assert d.core.next_deadline() == 1_000 + 100 + 22


def test_a_drain_that_begins_after_the_prefill_timeout_still_lasts_the_transfer_timeout() -> None:
    d = Driver(prefill_timeout_s=5.0)
    d.open()
    d.begin()
    d.wait(50)
    d.cancel()
    assert d.core.next_deadline() == d.now + 31


def test_the_end_of_a_prefill_shortens_a_drain_but_never_below_the_transfer_timeout() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.wait(10)
    d.prefill_ended(ok=True)
    assert d.core.next_deadline() == d.now + 31
    d.prefill_ended(ok=False, began=False)
    assert d.state() is State.DRAINING, "the first word of the metaserver counts"


def test_a_late_end_of_prefill_does_not_lengthen_a_drain() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.wait(320)
    d.prefill_ended()
    assert d.core.next_deadline() == 1_331


def test_an_unknown_id_at_the_proxy_ends_a_drain_at_once() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.prefill_ended(ok=False, began=False)
    assert d.outcome().state is State.CANCELLED


def test_a_proxy_that_denies_a_prefill_whose_sender_was_heard_is_not_believed() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.layers(0)
    d.prefill_ended(ok=False, began=False)
    assert d.state() is State.DRAINING
    assert d.core.next_deadline() == d.now + 31
    d.failed()
    assert d.outcome().state is State.FAILED


def test_a_broken_call_does_not_shorten_a_drain() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.prefill_ended(ok=False, over=False)
    assert d.core.next_deadline() == 1_331


def test_the_reason_to_end_is_the_first_one() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.failed("p1", of=2)
    d.send(ev.ShutdownDue())
    d.done("p2", of=2)
    assert (d.outcome().state, d.outcome().reason) == (State.CANCELLED, reasons.CANCELLED)


def test_a_lost_registration_is_fenced_and_kept_until_its_requests_have_drained() -> None:
    d = Driver()
    d.open()
    d.begin("a")
    d.submit("b")
    effects = d.send(ev.RankLost(ENGINE, 0, "unregistered"))
    assert only(effects, Fence) == [Fence(ENGINE, 0, 1)]
    assert not released(effects)
    assert d.state("b") is State.ACCEPTED, "who was never announced can wait for the next one"
    effects = d.done(external="x-a")
    assert released(effects) == [(0, 1)]
    assert (d.outcome("a").state, d.outcome("a").reason) == (
        State.FAILED,
        reasons.REGISTRATION_LOST,
    )


def test_an_unused_registration_is_released_at_once() -> None:
    d = Driver()
    d.open()
    assert released(d.send(ev.RankLost(ENGINE, 0, "unregistered"))) == [(0, 1)]


def test_fencing_every_rank_ends_the_drain_and_fencing_one_does_not() -> None:
    d = Driver()
    d.open(2)
    d.begin()
    d.send(ev.RankLost(ENGINE, 0, "worker gone"), ev.RankLost(ENGINE, 1, "worker gone"))
    assert not d.send(ev.RankFenced(ENGINE, 0, 1))
    assert d.state() is State.DRAINING
    effects = d.send(ev.RankFenced(ENGINE, 1, 2))
    assert d.outcome().state is State.FAILED
    assert sorted(released(effects)) == [(0, 1), (1, 2)]


def test_a_fence_around_another_registration_does_not_end_a_drain() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.register()
    assert d.state() is State.DRAINING
    d.send(ev.RankFenced(ENGINE, 0, 2), ev.RankFenced(ENGINE, 0, 7))
    assert d.state() is State.DRAINING
    d.send(ev.RankFenced(ENGINE, 0, 1))
    assert d.outcome().state is State.FAILED


def test_ranks_that_a_request_does_not_use_need_no_fence() -> None:
    d = Driver()
    d.open(2)
    d.submit()
    d.send(ev.Started(key(), 1, 1, d.generation))
    d.cancel()
    d.send(ev.RankFenced(ENGINE, 0, 1))
    assert d.outcome().state is State.CANCELLED


def test_a_newer_registration_does_not_wait_for_requests_of_the_older() -> None:
    d = Driver()
    d.open()
    d.begin("old")
    d.register()
    d.begin("new")
    d.register()
    assert released(d.done(external="x-new")) == [(0, 2)]
    assert d.state("old") is State.DRAINING
    assert released(d.done(external="x-old")) == [(0, 1)]


def test_a_start_on_registrations_that_are_gone_is_not_announced() -> None:
    d = Driver()
    d.open()
    d.submit()
    late = ev.Started(key(), 1, 1, d.generation)
    d.send(ev.RankLost(ENGINE, 0, "worker gone"))
    d.send(late)
    assert (d.outcome().state, d.outcome().reason) == (State.FAILED, reasons.REGISTRATION_LOST)


@pytest.mark.parametrize(("ranks", "generation"), [(0, 2), (3, 2), (2, 1), (2, 9)])
def test_a_start_must_name_the_registrations_in_force(ranks: int, generation: int) -> None:
    d = Driver()
    d.open(2)
    d.submit()
    d.send(ev.Started(key(), 1, ranks, generation))
    assert d.outcome().reason == reasons.REGISTRATION_LOST


def test_every_registration_is_announced_under_a_generation_of_its_own() -> None:
    d = Driver()
    d.open(2)
    d.begin()
    d.done(rank=0)
    d.done(rank=1)
    d.send(ev.RankLost(ENGINE, 0, "unregistered"))
    assert released(d.send(ev.RankRegistered(ENGINE, 0, 2))) == [(0, 2)], "2 names other addresses"
    assert not d.core.engines.by_id[ENGINE].ready
    d.register(0)
    assert d.core.engines.by_id[ENGINE].generation == 3


def test_a_registration_told_twice_is_one() -> None:
    d = Driver()
    d.open()
    d.begin()
    assert not d.send(ev.RankRegistered(ENGINE, 0, 1))
    assert d.state() is State.RECEIVING
    d.send(ev.RankLost(ENGINE, 0, "unregistered"))
    assert not d.send(ev.RankRegistered(ENGINE, 0, 1)), "it is released when its drain is over"
    assert released(d.done()) == [(0, 1)]


def test_registrations_may_arrive_out_of_order_while_none_was_announced() -> None:
    d = Driver()
    d.open(2, register=False)
    d.send(ev.RankRegistered(ENGINE, 1, 2), ev.RankRegistered(ENGINE, 0, 1))
    engine = d.core.engines.by_id[ENGINE]
    assert engine.ready
    assert engine.generation == 2


def test_blocks_reused_after_the_end_cannot_be_reached_by_a_late_writer_of_the_same_id() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.wait(331)
    d.acknowledge(1)
    d.submit(attempt=2)
    d.start(attempt=2)
    outcome = d.outcomes()[-1]
    assert (outcome.attempt, outcome.state, outcome.reason) == (
        2,
        State.FAILED,
        reasons.STALE_WRITERS,
    )


def test_a_worker_that_starts_anew_takes_its_registration_with_it() -> None:
    d = Driver()
    d.open()
    d.begin()
    effects = d.send(d.worker_opened(session="w2"))
    assert only(effects, Fence) == [Fence(ENGINE, 0, 1)]
    assert d.state() is State.DRAINING
    assert released(d.done()) == [(0, 1)]


def test_a_worker_that_reconnects_keeps_its_registration() -> None:
    d = Driver()
    d.open()
    d.begin()
    assert not d.send(d.worker_opened())
    assert d.state() is State.RECEIVING


def test_a_registration_whose_worker_died_meanwhile_is_given_back() -> None:
    d = Driver()
    d.open(register=False)
    d.close(worker(0), "w1")
    assert released(d.register()) == [(0, 1)]
    d.close()
    assert released(d.register()) == [(0, 2)]
    assert not d.core.engines.by_id
