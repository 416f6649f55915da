"""The story of a request: what happened, when, in order."""

from __future__ import annotations

from .driver import Driver, key


def story(d: Driver) -> list[tuple[float, str, str]]:
    return [(entry.time - 1_000, entry.what, entry.detail) for entry in d.core.story(key())]


def test_a_story_tells_a_whole_life_in_order_of_time() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.wait(1)
    d.layers(0)
    d.wait(1)
    d.layers(1, 3)
    d.prefill_ended()
    d.wait(1)
    d.done()
    assert story(d) == [
        (0, "accepted", "attempt 1"),
        (0, "receiving", "generation 1"),
        (1, "layers in", "rank 0 of p: layer 0"),
        (2, "prefill ended", "HTTP"),
        (2, "layers in", "rank 0 of p: layers 1-3"),
        (3, "sender done", "rank 0 of p, 1 due"),
        (3, "done", "received"),
    ]


def test_a_story_tells_why_a_request_drained_and_what_ended_the_drain() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.failed("p1", of=2)
    d.wait(2)
    d.cancel()
    d.prefill_ended(ok=False)
    d.wait(31)
    assert story(d)[2:] == [
        (0, "sender failed", "rank 0 of p1, 2 due"),
        (0, "draining", "sender_failed"),
        (2, "cancel repeated", "it is already draining"),
        (2, "prefill failed", "HTTP"),
        (33, "failed", "writers had their time"),
    ]


def test_a_story_tells_that_a_request_was_held() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.done()
    d.acknowledge(1)
    d.submit(attempt=2)
    d.wait(3.5)
    d.start(attempt=2)
    assert [what for _, what, _ in story(d)] == ["accepted", "held", "receiving"]


def test_a_story_tells_that_the_prefill_went_out_of_sight() -> None:
    d = Driver()
    d.open()
    d.begin()
    d.prefill_ended(ok=False, over=False)
    assert story(d)[2:] == [(0, "prefill out of sight", "HTTP")]


def test_an_unknown_request_has_no_story() -> None:
    assert Driver().core.story(key()) == []
