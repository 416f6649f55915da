"""Each load is reported once, in whatever order its beginning and its outcomes come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decoded.vllm.decode.metadata import Begun
from decoded.vllm.decode.worker import Awaited

LOADS = 6


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Beginnings in the order of their attempts, as schedulers tell them, and for each load one to
    three outcomes anywhere.
    """
    outcomes = draw(st.lists(st.integers(1, LOADS), max_size=2 * LOADS))
    outcomes += range(1, LOADS + 1)
    events = draw(st.permutations([("end", n) for n in outcomes] + [("begin", 0)] * LOADS))
    numbers = iter(range(1, LOADS + 1))
    return [(kind, next(numbers) if kind == "begin" else n) for kind, n in events]


@given(histories(), st.lists(st.booleans(), min_size=LOADS, max_size=LOADS))
def test_any_order(history: list[tuple[str, int]], good: list[bool]) -> None:
    awaited = Awaited()
    begun: set[int] = set()
    heard: set[int] = set()
    reported: list[int] = []
    for kind, n in history:
        if kind == "begin":
            begun.add(n)
            awaited.begin(Begun(f"r{n}", n, [n, n + 100]))
        else:
            heard.add(n)
            awaited.end(f"r{n}", n, good[n - 1])
        reports = awaited.take()
        new = sorted(int(one[1:]) for one in reports.ended)
        assert set(new) == begun & heard - set(reported)
        assert reports.failed == {f"r{n}" for n in new if not good[n - 1]}
        assert reports.failed_blocks == {
            block for n in new if not good[n - 1] for block in (n, n + 100)
        }
        reported += new
    assert sorted(reported) == list(range(1, LOADS + 1))


def test_an_outcome_of_an_earlier_attempt_is_not_this_ones() -> None:
    awaited = Awaited()
    awaited.begin(Begun("same", 1, []))
    awaited.end("same", 1, True)
    awaited.begin(Begun("same", 2, []))
    awaited.end("same", 1, True)
    assert awaited.take().ended == {"same"}
    assert awaited.take().ended == set()
    awaited.end("same", 2, False)
    assert awaited.take().failed == {"same"}
