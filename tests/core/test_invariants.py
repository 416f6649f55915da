"""`check()` finds what is broken and says it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from decoded.core.request import Prefill
from decoded.core.states import State

from .driver import ENGINE, SCHEDULER, Driver, key, worker


def break_state(d: Driver) -> None:
    d.request().state = State.DONE


def break_deadline(d: Driver) -> None:
    d.core.deadlines.clear(d.request())


def break_ending(d: Driver) -> None:
    d.request().ending = State.FAILED


def break_prefill(d: Driver) -> None:
    d.request().prefill = Prefill.NOT_ASKED


def break_external(d: Driver) -> None:
    d.core.ledger.by_external.clear()


def break_count(d: Driver) -> None:
    progress = d.request().progress
    assert progress is not None
    progress[0].spoken += 1


def break_live(d: Driver) -> None:
    d.core.engines.by_id[ENGINE].live = 7


def forget_engine(d: Driver) -> None:
    del d.core.engines.by_id[ENGINE]


def break_log(d: Driver) -> None:
    d.log.acknowledged[SCHEDULER] = 3


def break_writable(d: Driver) -> None:
    d.core.engines.by_id[ENGINE].writable.add((5, 5))


def break_retiring(d: Driver) -> None:
    d.core.engines.by_id[ENGINE].retiring[0, 9] = {key("nobody")}


def break_subscribers(d: Driver) -> None:
    d.core.engines.by_id[ENGINE].subscribers.add(worker(7))


def break_handed(d: Driver) -> None:
    d.request().handed = False


def bury_alive(d: Driver) -> None:
    d.core.ledger.tombstones[key()] = d.request()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (break_state, "is live in"),
        (break_deadline, "has no deadline"),
        (break_ending, "has ending"),
        (break_prefill, "has prefill"),
        (break_external, "external ids do not match"),
        (break_count, "miscounts its senders"),
        (break_live, "miscounts its requests"),
        (forget_engine, "is forgotten"),
        (break_log, "outside its log"),
        (break_writable, "can be written"),
        (break_retiring, "waits for the dead"),
        (break_subscribers, "seats that nobody holds"),
        (break_handed, "announced by nobody"),
        (bury_alive, "is buried in"),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[Driver], None], words: str) -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done("p1", of=2)
    damage(d)
    with pytest.raises(AssertionError, match=words):
        d.core.check()


def test_a_drain_that_is_too_short_is_found() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.cancel()
    d.core.deadlines.set(d.request(), d.now + 30)
    with pytest.raises(AssertionError, match="less than the transfer time-out"):
        d.core.check()
