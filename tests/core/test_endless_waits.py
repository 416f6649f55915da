"""Nothing waits for ever: every accepted request ends, and evidence brings its end closer."""

from __future__ import annotations

import pytest

from decoded.core import events as ev
from decoded.core import reasons
from decoded.core.effects import Stop
from decoded.core.states import State

from .driver import ENGINE, Driver, key, only, refusals, started


def test_a_request_whose_prefill_dies_silently_expires_after_deadline_and_drain() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.wait(299.9)
    assert d.state() is State.RECEIVING
    d.wait(0.1)
    assert d.state() is State.DRAINING
    d.wait(31)
    assert (d.outcome().state, d.outcome().reason) == (State.EXPIRED, reasons.DEADLINE)
    assert d.core.next_deadline() is None


def test_a_request_that_no_path_takes_up_expires() -> None:
    d = Driver()
    d.open()
    d.submit()
    d.wait(300)
    assert d.outcome().state is State.EXPIRED


@pytest.mark.parametrize(("wish", "lasts"), [(5.0, 5.0), (None, 300.0), (1e9, 300.0)])
def test_the_engine_can_shorten_the_deadline_but_not_lengthen_it(
    wish: float | None, lasts: float
) -> None:
    d = Driver()
    d.open()
    d.submit(timeout_s=wish)
    assert d.core.next_deadline() == d.now + lasts


def test_one_failed_sender_ends_the_wait_for_the_others_when_they_have_spoken() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done("p1", of=2)
    d.failed("p2", of=2)
    assert (d.outcome().state, d.outcome().reason) == (State.FAILED, reasons.SENDER_FAILED)
    assert "p2" in d.outcome().detail


def test_an_unknown_id_at_the_proxy_fails_the_request_at_once() -> None:
    d = Driver()
    d.open()
    d.begin()
    effects = d.prefill_ended(ok=False, began=False)
    assert (d.outcome().state, d.outcome().reason) == (State.FAILED, reasons.PREFILL_FAILED)
    assert only(effects, Stop)


def test_a_failed_prefill_ends_the_wait_after_the_transfer_timeout_not_the_deadline() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.prefill_ended(ok=False)
    d.wait(30.9)
    assert d.state() is State.DRAINING
    d.wait(0.1)
    assert d.outcome().elapsed_s == pytest.approx(31)
    assert d.outcome().state is State.FAILED


def test_after_a_good_prefill_the_missing_done_is_waited_for_briefly_and_named() -> None:
    d = Driver()
    d.open(2)
    d.begin()
    d.done("p1", rank=0, of=2)
    d.prefill_ended()
    d.wait(30)
    assert d.state() is State.DRAINING
    d.wait(31)
    outcome = d.outcome()
    assert (outcome.state, outcome.reason) == (State.EXPIRED, reasons.DONE_OVERDUE)
    assert "rank 0 heard 1 of 2" in outcome.detail
    assert "rank 1 heard nobody" in outcome.detail


def test_a_good_prefill_late_in_life_does_not_move_the_deadline_out() -> None:
    d = Driver()
    d.open()
    d.begin(timeout_s=10.0)
    d.wait(9)
    d.prefill_ended()
    d.wait(1)
    assert d.state() is State.DRAINING


def test_a_broken_call_proves_nothing_so_senders_may_still_finish_the_request() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.prefill_ended(ok=False, over=False)
    assert d.state() is State.RECEIVING
    d.done()
    assert d.outcome().state is State.DONE
    assert d.outcome().detail == ""


def test_a_broken_call_is_told_when_the_request_expires_of_it() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.prefill_ended(ok=False, over=False)
    d.wait(331)
    assert (d.outcome().state, d.outcome().detail) == (State.EXPIRED, "HTTP")


def test_a_request_that_waits_for_registrations_expires_with_that_reason() -> None:
    d = Driver()
    d.open(register=False)
    d.submit()
    d.send(ev.Deferred(key(), 1))
    d.wait(30)
    outcome = d.outcome()
    assert (outcome.state, outcome.reason) == (State.EXPIRED, reasons.KV_NOT_REGISTERED)
    assert "regist" in outcome.detail


def test_deferring_again_and_again_does_not_postpone_the_registration_deadline() -> None:
    d = Driver()
    d.open(register=False)
    d.submit()
    for _ in range(200):
        d.send(ev.Deferred(key(), 1))
        d.wait(0.14)
    assert d.core.next_deadline() == pytest.approx(1_030)
    assert len(d.core.deadlines) < 10
    d.wait(3)
    assert d.outcome().reason == reasons.KV_NOT_REGISTERED


def test_a_deferred_request_that_starts_in_time_gets_its_full_deadline_back() -> None:
    d = Driver()
    d.open(register=False)
    d.submit()
    d.send(ev.Deferred(key(), 1))
    d.wait(29)
    d.register()
    d.start()
    assert d.core.next_deadline() == 1_300
    d.wait(331)
    assert d.outcome().reason == reasons.DEADLINE


def test_a_path_that_cannot_start_fails_the_request_with_its_words() -> None:
    d = Driver()
    d.open()
    d.submit()
    d.send(ev.StartFailed(key(), 1, reasons.BAD_BLOCKS, "block 7 is out of range"))
    outcome = d.outcome()
    assert (outcome.state, outcome.reason) == (State.FAILED, reasons.BAD_BLOCKS)
    assert outcome.detail == "block 7 is out of range"


def test_a_cancelled_request_ends_even_if_its_prefill_never_answers() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.wait(330.9)
    assert d.state() is State.DRAINING
    d.wait(0.1)
    assert d.outcome().state is State.CANCELLED


def test_shutdown_ends_what_drains_by_evidence_and_refuses_new_requests() -> None:
    d = Driver()
    d.open()
    d.begin("a")
    d.submit("b")
    d.send(ev.ShutdownBegan())
    assert refusals(d.submit("c")) == [reasons.SHUTTING_DOWN]
    assert d.state("a") is State.RECEIVING, "what runs may finish until shutdown is due"
    d.send(ev.ShutdownDue())
    assert (d.outcome("b").state, d.outcome("b").reason) == (State.EXPIRED, reasons.SHUTDOWN)
    assert d.state("a") is State.DRAINING
    d.send(ev.RankFenced(ENGINE, 0, d.generation))
    assert (d.outcome("a").state, d.outcome("a").reason) == (State.EXPIRED, reasons.SHUTDOWN)


def test_a_tick_that_comes_very_late_ends_all_that_is_due() -> None:
    d = Driver()
    d.open()
    for name in ("a", "b", "c"):
        d.begin(name)
    d.now += 10_000
    d.send(ev.Tick())
    d.wait(31)
    assert not d.core.ledger.live


def test_the_clock_may_start_at_zero() -> None:
    d = Driver()
    d.now = 0.0
    d.open()
    d.begin()
    d.submit("soon", timeout_s=0.0)
    d.send(ev.Tick())
    assert d.outcome("soon").state is State.EXPIRED
    d.wait(331)
    assert d.outcome().state is State.EXPIRED
    assert started(d.submit(attempt=2)) == ["r"]
    d.start(attempt=2)
    assert d.outcomes()[-1].reason == reasons.STALE_WRITERS
