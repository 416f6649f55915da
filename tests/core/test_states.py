"""The table of states: what it holds, and that the machine does nothing beside it."""

from __future__ import annotations

import itertools

import pytest

from decoded.core import events as ev
from decoded.core.effects import Effect
from decoded.core.states import TERMINAL, TRANSITIONS, State, Trigger, transition

from .driver import ENGINE, Driver, key

A, R, D = State.ACCEPTED, State.RECEIVING, State.DRAINING
DONE, FAILED, CANCELLED, EXPIRED = State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED

# Written out by hand, so that a slip in the table shows.
EXPECTED = {
    (A, Trigger.FULFILLED): DONE,
    (A, Trigger.STARTED): R,
    (A, Trigger.PATH_FAILED): FAILED,
    (A, Trigger.CANCEL): CANCELLED,
    (A, Trigger.DEADLINE): EXPIRED,
    (R, Trigger.ALL_DONE): DONE,
    (R, Trigger.SENDER_FAILED): D,
    (R, Trigger.PREFILL_FAILED): D,
    (R, Trigger.MEMORY_LOST): D,
    (R, Trigger.CANCEL): D,
    (R, Trigger.DEADLINE): D,
}
ENDINGS = {
    Trigger.SENDER_FAILED: FAILED,
    Trigger.PREFILL_FAILED: FAILED,
    Trigger.MEMORY_LOST: FAILED,
    Trigger.CANCEL: CANCELLED,
    Trigger.DEADLINE: EXPIRED,
}
DRAIN_ENDS = (Trigger.WRITERS_GONE, Trigger.DRAIN_DEADLINE)


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("state", [A, R])
def test_before_the_drain_each_trigger_leads_where_it_should(
    state: State, trigger: Trigger
) -> None:
    row = transition(state, trigger)
    assert (row.target if row else None) == EXPECTED.get((state, trigger))
    if row is not None and row.target is D:
        assert row.ending is ENDINGS[trigger]


@pytest.mark.parametrize("ending", [FAILED, CANCELLED, EXPIRED])
@pytest.mark.parametrize("trigger", Trigger)
def test_a_drain_ends_as_it_was_meant_to_and_on_nothing_else(
    trigger: Trigger, ending: State
) -> None:
    row = transition(D, trigger, ending)
    assert (row.target if row else None) == (ending if trigger in DRAIN_ENDS else None)


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(TERMINAL, Trigger)))
def test_terminal_states_absorb_everything(state: State, trigger: Trigger) -> None:
    for ending in (None, *State):
        assert transition(state, trigger, ending) is None


def test_the_table_has_no_row_twice_and_every_state_can_be_reached_and_left() -> None:
    names = [
        (row.source, row.trigger, row.ending if row.source is D else None) for row in TRANSITIONS
    ]
    assert len(names) == len(set(names))
    reached = {A} | {row.target for row in TRANSITIONS}
    assert reached == set(State)
    assert {row.source for row in TRANSITIONS} == set(State) - TERMINAL
    assert {row.trigger for row in TRANSITIONS} == set(Trigger)


def test_a_drain_never_ends_in_done() -> None:
    assert all(row.ending is not DONE for row in TRANSITIONS)


def bring(state: State) -> Driver:
    """A driver whose request `r` is in `state`; its one sender has said nothing so far."""
    d = Driver(tombstone_age_s=10_000.0)
    d.open()
    if state is A:
        d.submit()
        return d
    d.begin()
    if state in (D, CANCELLED):
        d.cancel()
    elif state is DONE:
        d.done()
    elif state is EXPIRED:
        d.wait(300)
    if state in (CANCELLED, EXPIRED):
        d.done()
    elif state is FAILED:
        d.failed()
    assert d.state() is state
    return d


def fire(d: Driver, trigger: Trigger) -> list[Effect]:
    """Make `trigger` happen to request `r`, by the event that stands for it."""
    about = key(), 1
    events: dict[Trigger, ev.Event] = {
        Trigger.FULFILLED: ev.Fulfilled(*about, "virtual"),
        Trigger.STARTED: ev.Started(*about, 1, d.generation),
        Trigger.PATH_FAILED: ev.StartFailed(*about, "bad_blocks", "none such"),
        Trigger.ALL_DONE: ev.SenderDone(ENGINE, 0, "x-r", 1, "p"),
        Trigger.SENDER_FAILED: ev.SenderFailed(ENGINE, 0, "x-r", 1, "p"),
        Trigger.PREFILL_FAILED: ev.PrefillEnded(*about, False, True, "HTTP 502"),
        Trigger.MEMORY_LOST: ev.RankLost(ENGINE, 0, "unregistered"),
        Trigger.CANCEL: ev.Cancel(key()),
        Trigger.DEADLINE: ev.ShutdownDue(),
        Trigger.WRITERS_GONE: ev.PrefillEnded(*about, False, False, "HTTP 404"),
    }
    if trigger is Trigger.DRAIN_DEADLINE:
        return d.wait(1_000)
    return d.send(events[trigger])


# What a trigger stands for may also be the end of a drain, or an end by time.
FURTHER = {
    (R, Trigger.SENDER_FAILED): FAILED,  # the only sender: nobody is left to wait for
    (R, Trigger.WRITERS_GONE): FAILED,  # 404 tells both: it failed, and nobody writes
    (D, Trigger.ALL_DONE): CANCELLED,
    (D, Trigger.SENDER_FAILED): CANCELLED,
    (A, Trigger.DRAIN_DEADLINE): EXPIRED,
    (R, Trigger.DRAIN_DEADLINE): EXPIRED,
    (D, Trigger.DRAIN_DEADLINE): CANCELLED,
    (D, Trigger.WRITERS_GONE): CANCELLED,
}


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(State, Trigger)))
def test_the_machine_follows_the_table(state: State, trigger: Trigger) -> None:
    d = bring(state)
    told = len(d.outcomes())
    fire(d, trigger)
    wanted = FURTHER.get((state, trigger), EXPECTED.get((state, trigger), state))
    assert d.state() is wanted
    newly_ended = wanted in TERMINAL and state not in TERMINAL
    assert len(d.outcomes()) == told + newly_ended
