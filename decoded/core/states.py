"""The life of a request as data: states, triggers and the one table that joins them.

docs/architecture.md's picture is drawn from `TRANSITIONS`; nothing else in the
package decides which state follows which.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(str, Enum):
    """Where a request is. The last four are terminal and absorb everything."""

    # Enum's own is Python code; the table is asked several times per request.
    __hash__ = str.__hash__

    ACCEPTED = "accepted"
    RECEIVING = "receiving"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


class Trigger(str, Enum):
    """What moves a request from one state to the next."""

    __hash__ = str.__hash__

    FULFILLED = "nothing to fetch"
    STARTED = "announced to producers"
    PATH_FAILED = "cannot start"
    ALL_DONE = "every sender of every rank DONE"
    SENDER_FAILED = "a sender FAILED"
    PREFILL_FAILED = "prefill refused or failed"
    MEMORY_LOST = "registration lost"
    CANCEL = "cancel"
    DEADLINE = "deadline"
    WRITERS_GONE = "no writer left"
    DRAIN_DEADLINE = "transfer deadline"


@dataclass(frozen=True)
class Transition:
    """One row of the table.

    `ending` is the terminal state that a drain leads to: rows into DRAINING set
    it, rows out of DRAINING are chosen by it.
    """

    source: State
    trigger: Trigger
    target: State
    ending: State | None = None


_A, _R, _D = State.ACCEPTED, State.RECEIVING, State.DRAINING
_FAILED, _CANCELLED, _EXPIRED = State.FAILED, State.CANCELLED, State.EXPIRED

TERMINAL = frozenset({State.DONE, _FAILED, _CANCELLED, _EXPIRED})

TRANSITIONS: tuple[Transition, ...] = (
    # Before anyone was told where to write, no writer can exist: no drain is needed.
    Transition(_A, Trigger.FULFILLED, State.DONE),
    Transition(_A, Trigger.STARTED, _R),
    Transition(_A, Trigger.PATH_FAILED, _FAILED),
    Transition(_A, Trigger.CANCEL, _CANCELLED),
    Transition(_A, Trigger.DEADLINE, _EXPIRED),
    Transition(_R, Trigger.ALL_DONE, State.DONE),
    Transition(_R, Trigger.SENDER_FAILED, _D, _FAILED),
    Transition(_R, Trigger.PREFILL_FAILED, _D, _FAILED),
    Transition(_R, Trigger.MEMORY_LOST, _D, _FAILED),
    Transition(_R, Trigger.CANCEL, _D, _CANCELLED),
    Transition(_R, Trigger.DEADLINE, _D, _EXPIRED),
    *(
        Transition(_D, trigger, ending, ending)
        for trigger in (Trigger.WRITERS_GONE, Trigger.DRAIN_DEADLINE)
        for ending in (_FAILED, _CANCELLED, _EXPIRED)
    ),
)

_TABLE = {
    (row.source, row.trigger, row.ending if row.source is _D else None): row for row in TRANSITIONS
}


def transition(state: State, trigger: Trigger, ending: State | None = None) -> Transition | None:
    """The row for `trigger` in `state`, or None where the state absorbs it.

    `ending` matters in DRAINING only: it is the terminal state chosen when the
    drain began.
    """
    return _TABLE.get((state, trigger, ending if state is _D else None))
