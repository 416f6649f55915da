"""Which node is next."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from decoded.proxy import nodes as nodes_module
from decoded.proxy.errors import NoNode
from decoded.proxy.nodes import AVOID_S, Nodes

URLS = ("http://a", "http://b", "http://c")


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that goes on by so many seconds when it is told to."""
    now = [100.0]
    monkeypatch.setattr(nodes_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def later(seconds: float) -> None:
        now[0] += seconds

    return later


def test_equals_take_turns() -> None:
    nodes = Nodes("decode", URLS)
    assert [nodes.choose().url for _ in range(6)] == [*URLS, *URLS]


def test_the_least_loaded_is_next() -> None:
    nodes = Nodes("decode", URLS)
    a, b, c = nodes
    with a.busy(10), b.busy(5), c.busy(10):
        assert [nodes.choose() for _ in range(3)] == [b, b, b]
        with b.busy(5):
            # Of the same load: who has fewer requests.
            assert {nodes.choose() for _ in range(3)} == {a, c}
    assert (a.load, a.legs) == (0, 0)


def test_load_ends_with_an_error() -> None:
    [node] = Nodes("decode", URLS[:1])
    with pytest.raises(KeyError), node.busy(5):
        raise KeyError
    assert (node.load, node.legs) == (0, 0)


def test_who_was_unreachable_is_last_for_a_while(sleep: Callable[[float], None]) -> None:
    nodes = Nodes("decode", URLS)
    a, b, c = nodes
    a.unreachable()
    with b.busy(1000), c.busy(2000):
        assert {nodes.choose() for _ in range(3)} == {b}
        assert nodes.choose([b, c]) is a
        sleep(AVOID_S)
        assert {nodes.choose() for _ in range(3)} == {a}


def test_nobody_is_left() -> None:
    nodes = Nodes("decode", URLS)
    with pytest.raises(NoNode, match="none of 3 decode nodes"):
        nodes.choose(list(nodes))
    with pytest.raises(NoNode, match="none of 0 prefill nodes"):
        Nodes("prefill", ()).choose()
