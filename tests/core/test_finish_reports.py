"""Each accepted submit has one outcome, and nobody who waits for it can miss it or get two."""

from __future__ import annotations

from array import array

from decoded.core import events as ev
from decoded.core import reasons
from decoded.core.effects import Report, Resend, Stop
from decoded.core.states import State

from .driver import ENGINE, SCHEDULER, Driver, key, only, refusals, started, worker


def kept(d: Driver, seat: ev.Seat = SCHEDULER) -> list[tuple[str, int]]:
    """What the seat has not acknowledged, as (id, attempt)."""
    return [(o.request_id, o.attempt) for o in d.log.since(d.log.acknowledged[seat] + 1, 1_000)]


def test_a_double_end_signal_is_reported_once() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    assert not d.done()
    assert not d.failed()
    assert not d.cancel()
    assert not d.send(ev.Fulfilled(key(), 1, reasons.NOTHING_TO_FETCH))
    assert not d.prefill_ended(ok=False)
    d.send(ev.ShutdownDue())
    d.wait(1_000)
    assert len(d.outcomes()) == 1


def test_cancel_races_done_and_only_one_wins() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.done()
    assert [o.state for o in d.outcomes()] == [State.CANCELLED]


def test_the_report_comes_before_the_path_is_stopped() -> None:
    d = Driver()
    d.open()
    d.begin()
    assert [type(effect) for effect in d.done()] == [Report, Stop]


def test_cancelling_what_is_not_there_says_nothing() -> None:
    d = Driver()
    d.open()
    assert not d.cancel()
    d.begin(attempt=2)
    assert not d.cancel(attempt=1)
    assert d.state() is State.RECEIVING


def test_a_submit_that_is_sent_again_after_a_reconnect_runs_once() -> None:
    d = Driver()
    d.open()
    d.submit()
    assert not d.submit()
    d.start()
    assert not d.submit()
    d.done()
    assert not d.submit(), "its outcome is on its way"
    assert d.core.counters["repeated_submit"] == 3
    assert kept(d) == [("r", 1)]


def test_a_repeat_is_known_for_as_long_as_its_outcome_is_unsent() -> None:
    d = Driver(max_tombstones=2, tombstone_age_s=1.0)
    d.open()
    d.begin()
    d.done()
    for number in range(5):
        d.submit(f"v{number}", virtual=True)
        d.cancel(f"v{number}")
    d.wait(5)
    assert not d.core.ledger.tombstones
    assert not d.submit(), "a second run would write into blocks that the first gave back"
    assert d.outcomes()[0].state is State.DONE


def test_an_id_may_be_used_again_once_its_outcome_is_acknowledged() -> None:
    d = Driver()
    d.open()
    d.submit(virtual=True)
    d.cancel()
    d.acknowledge(1)
    assert started(d.submit(virtual=True)) == ["r"]


def test_a_live_duplicate_is_refused_and_the_first_goes_on() -> None:
    d = Driver()
    d.open()
    d.begin()
    assert refusals(d.submit(blocks=(array("q", [9]),))) == [reasons.LIVE_DUPLICATE]
    assert refusals(d.submit(attempt=2)) == [reasons.LIVE_DUPLICATE]
    assert refusals(d.submit("other", external="x-r")) == [reasons.DUPLICATE_EXTERNAL_ID]
    d.done()
    assert d.outcome().state is State.DONE


def test_an_attempt_that_is_over_is_refused() -> None:
    d = Driver()
    d.open()
    d.submit(attempt=2)
    d.cancel()
    assert refusals(d.submit(attempt=1)) == [reasons.STALE_ATTEMPT]
    d.acknowledge(1)
    assert refusals(d.submit(attempt=1)) == [reasons.STALE_ATTEMPT]


def test_a_refused_submit_has_no_outcome() -> None:
    d = Driver()
    d.open()
    d.send(ev.ShutdownBegan())
    d.submit()
    d.wait(1_000)
    assert not d.outcomes()


def test_a_submit_without_a_session_is_refused() -> None:
    assert refusals(Driver().submit()) == [reasons.UNKNOWN_ENGINE]


# The log


def test_outcomes_stay_until_acknowledged_and_are_sent_again_after_a_reconnect() -> None:
    d = Driver()
    d.open()
    for name in ("a", "b", "c"):
        d.submit(name)
        d.cancel(name)
    d.acknowledge(1)
    effects = d.send(ev.SessionOpened(SCHEDULER, "s1", 1))
    assert only(effects, Resend) == [Resend(SCHEDULER, 2)]
    assert kept(d) == [("b", 1), ("c", 1)]


def test_acknowledgements_that_cannot_be_are_ignored() -> None:
    d = Driver()
    d.open()
    d.submit("a")
    d.cancel("a")
    d.acknowledge(2)
    d.acknowledge(-1)
    d.acknowledge(1, worker(5))
    d.send(ev.Acknowledged(SCHEDULER, d.log.log + 1, 1))
    d.send(ev.Acknowledged(ev.Seat("nobody", "scheduler", 0), 1, 1))
    assert kept(d) == [("a", 1)]
    d.acknowledge(1)
    d.acknowledge(0)
    assert kept(d) == []
    assert d.core.counters["stray_acknowledge"] == 4


def test_an_outcome_waits_for_the_slowest_reader() -> None:
    d = Driver()
    d.open(2)
    d.submit("a")
    d.cancel("a")
    d.acknowledge(1)
    d.acknowledge(1, worker(0))
    assert kept(d, worker(1)) == [("a", 1)]
    assert kept(d) == []
    d.close(worker(1), "w1")
    assert len(d.log) == 0


def test_expected_workers_get_what_ended_before_they_came() -> None:
    d = Driver()
    d.send(ev.SessionOpened(SCHEDULER, "s1", 2, True, True))
    d.submit("a", virtual=True)
    d.cancel("a")
    d.acknowledge(1)
    d.ranks = 2
    effects = d.send(d.worker_opened(1))
    assert only(effects, Resend) == [Resend(worker(1), 1)]
    assert kept(d, worker(1)) == [("a", 1)]
    assert kept(d, worker(0)) == [("a", 1)]


def test_an_expected_worker_that_comes_back_misses_nothing() -> None:
    d = Driver()
    d.open(2, expect_workers=True)
    d.submit("a", virtual=True)
    d.cancel("a")
    d.acknowledge(1)
    d.acknowledge(1, worker(0))
    d.close(worker(1), "w1")
    d.submit("b", virtual=True)
    d.cancel("b")
    assert kept(d, worker(1)) == [("a", 1), ("b", 1)]
    assert only(d.send(d.worker_opened(1)), Resend) == [Resend(worker(1), 1)]
    d.acknowledge(1, worker(1))
    d.close(worker(1), "w1")
    assert only(d.send(d.worker_opened(1, session="w2")), Resend) == [Resend(worker(1), 2)]


def test_a_new_worker_in_the_seat_of_one_that_was_ahead_gets_all_that_is_kept() -> None:
    d = Driver()
    d.open(expect_workers=True)
    d.submit("a", virtual=True)
    d.cancel("a")
    d.acknowledge(1, worker(0))
    assert kept(d, worker(0)) == []
    d.send(d.worker_opened(session="w2"))
    assert kept(d, worker(0)) == [("a", 1)]


def test_workers_are_waited_for_no_longer_than_the_scheduler_wants_it() -> None:
    d = Driver()
    d.send(ev.SessionOpened(SCHEDULER, "s1", 2, True, True))
    d.submit("a", virtual=True)
    d.cancel("a")
    d.acknowledge(1)
    assert len(d.log) == 1
    d.send(ev.SessionOpened(SCHEDULER, "s1", 2, True, False))
    assert len(d.log) == 0


def test_a_seat_that_reads_nothing_is_not_waited_for() -> None:
    d = Driver()
    d.open(worker_subscribes=False)
    d.send(ev.SessionOpened(SCHEDULER, "s2", 1))
    for _ in range(3):
        d.submit("a", virtual=True)
        d.cancel("a")
        d.acknowledge(d.log.last)
    assert len(d.log) == 0
    assert d.log.acknowledged == {SCHEDULER: 3}


def test_a_seat_may_stop_reading() -> None:
    d = Driver()
    d.open()
    d.submit("a", virtual=True)
    d.cancel("a")
    d.send(ev.SessionOpened(SCHEDULER, "s1", 1, False))
    assert SCHEDULER not in d.log.acknowledged


def test_a_scheduler_that_only_submits_has_its_repeats_known_while_workers_wait() -> None:
    d = Driver()
    d.open(subscribe=False)
    d.submit(virtual=True)
    d.cancel()
    assert not d.submit(virtual=True)
    d.acknowledge(1, worker(0))
    assert started(d.submit(virtual=True)) == ["r"]


def test_outcomes_that_nobody_reads_are_numbered_but_not_kept() -> None:
    d = Driver()
    d.open(subscribe=False, worker_subscribes=False)
    d.submit(virtual=True)
    (report,) = only(d.cancel(), Report)
    assert report.seq == 1
    assert (d.log.last, len(d.log)) == (1, 0)


def test_engines_have_logs_of_their_own() -> None:
    d = Driver()
    d.open()
    d.send(ev.SessionOpened(ev.Seat("other", "scheduler", 0), "s1", 1))
    d.submit("a")
    d.cancel("a")
    assert d.core.engines.by_id["other"].log.last == 0
    assert d.core.engines.by_id["other"].log.log != d.log.log
    assert ENGINE in d.core.engines.by_id
