"""The heap of deadlines, alone."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from decoded.core.deadlines import Deadlines
from decoded.core.request import Request, RequestKey


def request(number: int) -> Request:
    key = RequestKey("e", str(number))
    return Request(key, str(number), 1, (), 0, 0, False, {}, submitted_at=0.0)


def test_without_requests_nothing_is_due() -> None:
    deadlines = Deadlines()
    assert deadlines.next() is None
    assert list(deadlines.due(math.inf)) == []


def test_a_moved_deadline_counts_and_the_old_one_does_not() -> None:
    deadlines, one = Deadlines(), request(1)
    deadlines.set(one, 5.0)
    deadlines.set(one, 9.0)
    assert list(deadlines.due(8.0)) == []
    assert deadlines.next() == 9.0
    assert list(deadlines.due(9.0)) == [one]
    assert deadlines.next() is None


def test_a_deadline_moved_away_and_back_fires_once() -> None:
    deadlines, one = Deadlines(), request(1)
    for when in (5.0, 9.0, 5.0):
        deadlines.set(one, when)
    assert list(deadlines.due(20.0)) == [one]


def test_a_request_may_be_given_a_new_deadline_while_it_is_due() -> None:
    deadlines, one = Deadlines(), request(1)
    deadlines.set(one, 5.0)
    fired = []
    for due in deadlines.due(10.0):
        fired.append(due)
        if len(fired) < 3:
            deadlines.set(one, 5.0 + len(fired))
    assert fired == [one] * 3


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 50.0)), min_size=1, max_size=200),
    st.sets(st.integers(0, 9)),
)
def test_due_comes_in_order_of_time_whatever_was_moved_cleared_and_swept(
    moves: list[tuple[int, float]], cleared: set[int]
) -> None:
    deadlines = Deadlines()
    requests = [request(number) for number in range(10)]
    wanted: dict[int, float] = {}
    for number, when in moves:
        deadlines.set(requests[number], when)
        wanted[number] = when
    for number in cleared:
        deadlines.clear(requests[number])
        wanted.pop(number, None)
    deadlines.sweep(live=-1_024)
    # A deadline that was moved away and back has two entries; they fire once.
    current = [when for number, when in moves if wanted.get(number) == when]
    assert len(wanted) <= len(deadlines) <= len(current)
    assert deadlines.next() == min(wanted.values(), default=None)
    fired = [(int(due.external_id), wanted[int(due.external_id)]) for due in deadlines.due(50.0)]
    assert sorted(fired) == sorted(wanted.items())
    assert [when for _, when in fired] == sorted(wanted.values())
