"""No request is called whole that is not: counts, identities, and words from an earlier life."""

from __future__ import annotations

import pytest

from decoded.core import events as ev
from decoded.core import reasons
from decoded.core.effects import Effect
from decoded.core.states import State

from .driver import ENGINE, Driver, started


def test_a_request_is_whole_when_every_sender_of_every_rank_is_done() -> None:
    d = Driver()
    d.open(3)
    d.begin()
    for rank in range(3):
        for sender in ("p1", "p2"):
            assert d.state() is State.RECEIVING
            d.done(sender, rank=rank, of=2)
    assert (d.outcome().state, d.outcome().reason) == (State.DONE, reasons.RECEIVED)


def test_a_repeated_message_counts_once() -> None:
    d = Driver()
    d.open()
    d.begin()
    for _ in range(5):
        d.done("p1", of=2)
    assert d.state() is State.RECEIVING
    assert d.core.counters["sender_repeated"] == 4
    d.done("p2", of=2)
    assert d.outcome().state is State.DONE


def test_one_sender_may_serve_several_ranks_and_is_counted_at_each() -> None:
    d = Driver()
    d.open(2)
    d.begin()
    d.done("p", rank=0)
    d.done("p", rank=0)
    assert d.state() is State.RECEIVING
    d.done("p", rank=1)
    assert d.outcome().state is State.DONE


def test_senders_that_disagree_on_their_number_are_held_to_the_highest() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done("p1", of=3)
    d.done("p2", of=2)
    assert d.state() is State.RECEIVING
    d.done("p3", of=1)
    assert d.outcome().state is State.DONE


def test_layer_progress_alone_completes_nothing() -> None:
    d = Driver()
    d.open()
    d.begin()
    for layer in range(32):
        d.layers(layer)
    assert d.state() is State.RECEIVING


def test_failed_after_done_by_the_same_sender_fails_the_request() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done("p1", of=2)
    d.failed("p1", of=2)
    d.done("p2", of=2)
    assert d.outcome().state is State.FAILED


def test_a_transfer_that_failed_does_not_heal() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.failed("p1", of=2)
    d.done("p1", of=2)
    d.done("p2", of=2)
    assert d.outcome().state is State.FAILED


def test_a_message_to_a_rank_that_does_not_exist_counts_nowhere() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done(rank=1)
    d.done(rank=-1)
    assert d.state() is State.RECEIVING
    assert d.core.counters["sender_stray_rank"] == 2


def test_a_message_names_its_engine() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.send(ev.SenderDone("another", 0, "x-r", 1, "p"))
    assert d.state() is State.RECEIVING


def test_the_wire_names_the_external_id_and_the_outcome_both() -> None:
    d = Driver()
    d.open()
    d.begin("cmpl-1-0a1b2c3d", external="cmpl-1")
    d.done(external="cmpl-1-0a1b2c3d")
    assert d.state("cmpl-1-0a1b2c3d") is State.RECEIVING
    d.done(external="cmpl-1")
    outcome = d.outcome("cmpl-1-0a1b2c3d")
    assert (outcome.request_id, outcome.external_id) == ("cmpl-1-0a1b2c3d", "cmpl-1")


# Words from an earlier life


def test_done_before_the_submit_is_not_remembered() -> None:
    d = Driver()
    d.open()
    d.done()
    d.begin()
    assert d.state() is State.RECEIVING
    assert d.core.counters["sender_early"] == 1


def test_done_before_the_announcement_is_not_remembered() -> None:
    d = Driver()
    d.open()
    d.submit()
    d.done()
    d.layers(0)
    d.start()
    assert d.state() is State.RECEIVING
    assert d.request().progress is None


def again(d: Driver) -> list[Effect]:
    """The scheduler knows of the outcome and submits the next attempt."""
    d.acknowledge(d.log.last)
    return d.submit(attempt=d.request().attempt + 1)


def test_a_request_that_is_fetched_again_does_not_start_with_its_old_success() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    assert not started(again(d)), "the sender may have missed our ACK and repeat itself"
    d.done()
    d.wait(3.5)
    d.start(attempt=2)
    assert d.state() is State.RECEIVING
    d.done()
    assert [o.attempt for o in d.outcomes()] == [1, 2]


def test_a_reused_id_is_held_until_the_old_senders_are_quiet_and_no_longer() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    d.wait(2)
    assert not started(again(d))
    assert not started(d.wait(1.4))
    assert started(d.wait(0.2)) == ["r"]


def test_a_sender_that_repeats_itself_prolongs_the_hold() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    again(d)
    d.wait(3)
    d.done()
    assert not started(d.wait(3.4))
    assert started(d.wait(0.2)) == ["r"]


def test_the_hold_ends_with_the_deadline_at_the_latest() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    d.acknowledge(1)
    d.submit(attempt=2, timeout_s=1.0)
    d.wait(1)
    assert d.outcomes()[-1].state is State.EXPIRED


def test_a_held_request_can_be_cancelled() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    again(d)
    d.cancel()
    assert d.outcomes()[-1].state is State.CANCELLED
    assert not started(d.wait(10))


def test_the_path_has_no_say_in_a_request_it_was_not_given() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    again(d)
    d.start(attempt=2)
    assert d.state() is State.ACCEPTED


def test_an_id_whose_senders_were_never_heard_is_not_held() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.prefill_ended(ok=False, began=False)
    assert started(again(d)) == ["r"]
    d.start(attempt=2)
    assert d.state() is State.RECEIVING


def test_a_late_word_settles_that_an_old_writer_is_gone() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.wait(331)
    d.failed()
    assert d.core.counters["sender_late"] == 1
    again(d)
    assert started(d.wait(3.5)) == ["r"]
    d.start(attempt=2)
    assert d.state() is State.RECEIVING


def test_a_late_word_between_start_and_announcement_fails_closed() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.wait(331)
    assert started(again(d)) == ["r"]
    d.wait(10)
    d.done()
    d.wait(1)
    d.start(attempt=2)
    assert d.outcomes()[-1].reason == reasons.STALE_WRITERS


@pytest.mark.parametrize("way", ["stale", "cancelled", "virtual"])
def test_a_use_that_was_never_announced_does_not_hide_old_writers(way: str) -> None:
    d = Driver()
    d.open()
    d.begin()
    d.wait(331)
    d.acknowledge(1)
    d.submit(attempt=2, virtual=way == "virtual")
    if way == "stale":
        d.start(attempt=2)
    else:
        d.cancel()
    assert d.state().terminal
    again(d)
    d.start(attempt=3)
    assert d.outcomes()[-1].reason == reasons.STALE_WRITERS


def test_old_writers_are_remembered_by_external_id_whatever_the_internal_one() -> None:
    d = Driver()
    d.open()
    d.begin("first", external="x")
    d.wait(331)
    d.submit("second", external="x")
    d.start("second")
    assert d.outcome("second").reason == reasons.STALE_WRITERS


def test_virtual_requests_do_not_push_old_writers_out_of_memory() -> None:
    d = Driver(max_tombstones=4)
    d.open()
    d.begin()
    d.wait(331)
    for number in range(20):
        d.submit(f"v{number}", virtual=True)
        d.cancel(f"v{number}")
    d.submit("other", external="x-r")
    d.start("other")
    assert d.outcome("other").reason == reasons.STALE_WRITERS


def test_old_writers_are_forgotten_with_age() -> None:
    d = Driver(tombstone_age_s=100.0)
    d.open()
    d.begin()
    d.wait(331)
    d.wait(101)
    d.submit(attempt=2)
    d.start(attempt=2)
    assert d.state() is State.RECEIVING


def test_an_engine_that_came_back_is_not_fooled_by_words_to_its_last_life() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.open(session="s2", register=False)
    d.done()
    assert d.request().state is State.CANCELLED
    d.submit()
    d.wait(3.5)
    d.start()
    d.send(ev.SenderDone(ENGINE, 0, "x-r", 2, "p2"))
    assert d.state() is State.RECEIVING
