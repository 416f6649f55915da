"""Engines that go, come back and start anew: what is theirs is given back, nothing leaks across."""

from __future__ import annotations

from decoded.core import events as ev
from decoded.core import reasons
from decoded.core.effects import Report
from decoded.core.states import State

from .driver import ENGINE, SCHEDULER, Driver, only, refusals, released, started, worker


def test_a_scheduler_that_dies_cancels_its_requests() -> None:
    d = Driver()
    d.open()
    d.submit("a")
    d.begin("b")
    d.close()
    assert (d.outcome("a").state, d.outcome("a").reason) == (State.CANCELLED, reasons.ENGINE_LOST)
    assert d.state("b") is State.DRAINING
    d.done(external="x-b")
    assert d.outcome("b").reason == reasons.ENGINE_LOST


def test_an_engine_that_dies_leaves_nothing_behind_once_its_writers_are_gone() -> None:
    d = Driver()
    d.open(2)
    d.begin()
    d.close()
    assert not released(d.close(worker(0), "w1"))
    assert not released(d.close(worker(1), "w1"))
    assert ENGINE in d.core.engines.by_id
    assert sorted(released(d.wait(331))) == [(0, 1), (1, 2)]
    assert not d.core.engines.by_id


def test_a_worker_that_dies_in_warm_up_gives_its_registration_back() -> None:
    d = Driver()
    d.open()
    assert released(d.close(worker(0), "w1")) == [(0, 1)]


def test_a_close_of_a_session_that_was_replaced_changes_nothing() -> None:
    d = Driver()
    d.open()
    d.open(session="s2", register=False)
    d.begin()
    assert not d.close(session="s1")
    assert d.state() is State.RECEIVING


def test_a_scheduler_that_starts_anew_gets_a_new_log_and_no_old_outcomes() -> None:
    d = Driver()
    d.open()
    d.submit("ended")
    d.cancel("ended")
    d.begin("pushing")
    old = d.log.log
    effects = d.send(ev.SessionOpened(SCHEDULER, "s2", 1))
    assert not only(effects, Report)
    assert d.log.log != old
    assert len(d.log) == 0
    (report,) = only(d.done(external="x-pushing"), Report)
    assert (report.seq, report.outcome.reason) == (0, reasons.ENGINE_RESTARTED)
    assert len(d.log) == 0, "the new scheduler never submitted it"


def test_an_acknowledgement_for_the_old_log_does_not_trim_the_new() -> None:
    d = Driver()
    d.open()
    old = d.log.log
    d.send(ev.SessionOpened(SCHEDULER, "s2", 1))
    d.submit("a")
    d.cancel("a")
    d.send(ev.Acknowledged(SCHEDULER, old, 1))
    assert len(d.log) == 1


def test_a_new_scheduler_is_not_kept_waiting_by_the_requests_of_the_last_one() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.send(ev.SessionOpened(SCHEDULER, "s2", 1))
    assert refusals(d.submit()) == [reasons.LIVE_DUPLICATE], "as a repeat it would never end"
    d.done()
    assert started(d.submit(virtual=True)) == ["r"]


def test_a_new_scheduler_may_count_attempts_from_one() -> None:
    d = Driver()
    d.open()
    d.submit(attempt=5)
    d.cancel()
    d.send(ev.SessionOpened(SCHEDULER, "s2", 1))
    assert started(d.submit(attempt=1)) == ["r"]


def test_workers_keep_their_registrations_when_the_scheduler_starts_anew() -> None:
    d = Driver()
    d.open()
    assert not released(d.send(ev.SessionOpened(SCHEDULER, "s2", 1)))
    assert d.core.engines.by_id[ENGINE].ready


def test_a_scheduler_given_up_by_mistake_can_submit_again_and_gets_its_outcome() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.close()
    d.send(ev.SessionOpened(SCHEDULER, "s1", 1))
    assert not d.submit(), "it drains still; its outcome will come"
    d.done()
    assert [o.state for o in d.log.since(1, 10)] == [State.CANCELLED]


def test_one_engine_does_not_end_with_another() -> None:
    d = Driver()
    d.open()
    d.begin()
    other = ev.Seat("other", "scheduler", 0)
    d.send(ev.SessionOpened(other, "s1", 1), ev.SessionClosed(other, "s1", "gone"))
    assert d.state() is State.RECEIVING
    assert list(d.core.engines.by_id) == [ENGINE]


def test_losing_what_was_never_there_is_harmless() -> None:
    d = Driver()
    assert not d.send(ev.RankLost(ENGINE, 0, "gone"))
    assert not d.send(ev.RankFenced(ENGINE, 0, 1))
    assert not d.close()
    d.open(register=False)
    assert not d.send(ev.RankLost(ENGINE, 0, "gone"))
    assert not d.close(worker(3), "w1")
