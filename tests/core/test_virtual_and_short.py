"""Requests that need no transfer: virtual ones, and those with nothing to fetch."""

from __future__ import annotations

import pytest

from decoded.core import events as ev
from decoded.core import reasons
from decoded.core.effects import Report, Stop
from decoded.core.states import State

from .driver import Driver, key, released, started


@pytest.mark.parametrize("why", [reasons.VIRTUAL, reasons.NOTHING_TO_FETCH])
def test_it_is_done_with_no_external_event_and_no_registration(why: str) -> None:
    d = Driver()
    d.open(register=False)
    assert started(d.submit(virtual=why == reasons.VIRTUAL)) == ["r"]
    effects = d.send(ev.Fulfilled(key(), 1, why))
    assert [type(effect) for effect in effects] == [Report, Stop]
    assert (d.outcome().state, d.outcome().reason) == (State.DONE, why)


def test_a_delayed_virtual_request_can_be_cancelled_and_expires() -> None:
    d = Driver()
    d.open()
    d.submit("a", virtual=True)
    d.submit("b", virtual=True)
    d.cancel("a")
    assert d.outcome("a").state is State.CANCELLED
    d.wait(300)
    assert d.outcome("b").state is State.EXPIRED


def test_messages_about_a_virtual_request_are_nobodys() -> None:
    d = Driver()
    d.open()
    d.submit(virtual=True)
    d.done()
    d.failed()
    assert d.state() is State.ACCEPTED
    assert d.request().progress is None


def test_a_virtual_request_keeps_no_registration_in_use() -> None:
    d = Driver()
    d.open()
    d.submit(virtual=True)
    assert released(d.register()) == [(0, 1)]
    assert d.state() is State.ACCEPTED


def test_a_virtual_request_is_not_held_for_old_senders() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    assert started(d.submit("other", external="x-r", virtual=True)) == ["other"]


def test_a_request_that_is_being_received_cannot_be_fulfilled_by_its_path() -> None:
    d = Driver()
    d.open()
    d.begin()
    assert not d.send(ev.Fulfilled(key(), 1, reasons.VIRTUAL))
    assert d.state() is State.RECEIVING


def test_the_path_of_another_attempt_has_no_say() -> None:
    d = Driver()
    d.open()
    d.submit(attempt=2)
    assert not d.send(ev.Fulfilled(key(), 1, reasons.VIRTUAL))
    assert not d.send(ev.StartFailed(key(), 1, reasons.BAD_BLOCKS, ""))
    assert not d.send(ev.Deferred(key(), 1))
    assert d.state() is State.ACCEPTED
