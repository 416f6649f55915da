"""What raises inside the daemon is logged and counted, and nothing else is lost for it."""

from __future__ import annotations

import asyncio
import resource
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from decoded.core import Core
from decoded.core import effects as fx
from decoded.core import events as ev
from decoded.core.engines import Engines
from decoded.core.request import Outcome, Request, RequestKey
from decoded.core.states import State
from decoded.daemon.daemon import max_connections
from decoded.daemon.dispatcher import Dispatcher
from decoded.edges.metaserver import PrefillReply
from decoded.receiver.path import Destination, ReceiverPath
from tests.edges.support import small_layout

SEAT = ev.Seat("e", "scheduler", 0)


class Parts:
    """Link, memory and both paths, which fail as told and note what they were asked."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.seen: list[str] = []

    def _ask(self, what: str) -> None:
        self.seen.append(what)
        if what in self.broken:
            raise RuntimeError(f"{what} is broken")

    def outcome_ready(self, engine_id: str) -> None:
        self._ask("outcome_ready")

    def resend(self, seat: ev.Seat, first: int) -> None:
        self._ask("resend")

    def refuse(self, key: RequestKey, attempt: int, code: str, detail: str) -> None:
        self._ask(f"refuse {key.request_id}")

    def flush(self) -> None:
        self._ask("flush")

    def fence(self, effect: fx.Fence) -> None:
        self._ask("fence")

    def release(self, effect: fx.Release) -> None:
        self._ask("release")

    def start(self, request: Request) -> Sequence[ev.Event]:
        self._ask(f"start {request.key.request_id}")
        return (ev.Fulfilled(request.key, request.attempt, "virtual"),)

    def stop(self, request: Request) -> None:
        self._ask(f"stop {request.key.request_id}")


def submit(name: str) -> ev.Submit:
    return ev.Submit(RequestKey("e", name), f"x-{name}", 1, (), 16, 0, True)


def ended(core: Core) -> dict[str, tuple[State, str]]:
    log = core.engines.by_id["e"].log
    outcomes: list[Outcome] = log.since(1, 100)
    return {each.request_id: (each.state, each.reason) for each in outcomes}


@pytest.mark.parametrize(
    ("broken", "errors"), [("outcome_ready", 3), ("stop r2", 1), ("start r2", 1)]
)
def test_an_effect_that_raises_leaves_the_others_alone(broken: str, errors: int) -> None:
    async def run() -> None:
        parts, core = Parts(), Core()
        dispatcher = Dispatcher(core)
        dispatcher.wire_up(parts, parts, parts, parts)
        dispatcher.dispatch(ev.SessionOpened(SEAT, "s", 1))
        parts.broken.add(broken)
        for name in ("r1", "r2", "r3"):
            dispatcher.dispatch(submit(name))
        assert core.counters["internal_errors"] == errors
        expected = {name: (State.DONE, "virtual") for name in ("r1", "r2", "r3")}
        if broken == "start r2":
            expected["r2"] = (State.FAILED, "internal")
        assert ended(core) == expected
        assert [each for each in parts.seen if each.startswith("stop")] == [
            "stop r1",
            "stop r2",
            "stop r3",
        ]
        core.check()
        dispatcher.close()

    asyncio.run(run())


def test_an_event_that_the_core_cannot_handle_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        parts, core = Parts(), Core()
        handle = core.handle

        def failing(event: ev.Event, now: float) -> list[fx.Effect]:
            if isinstance(event, ev.Submit) and event.key.request_id == "r2":
                raise RuntimeError("a bug")
            return handle(event, now)

        monkeypatch.setattr(core, "handle", failing)
        dispatcher = Dispatcher(core)
        dispatcher.wire_up(parts, parts, parts, parts)
        dispatcher.dispatch(ev.SessionOpened(SEAT, "s", 1))
        for name in ("r1", "r2", "r3"):
            dispatcher.dispatch(submit(name))
        assert core.counters["internal_errors"] == 1
        assert set(ended(core)) == {"r1", "r3"}
        dispatcher.close()

    asyncio.run(run())


def test_a_metaserver_call_that_raises_proves_nothing_about_the_prefill() -> None:
    class Broken:
        async def announce(self, *_: Any) -> PrefillReply:
            raise RuntimeError("a bug")

    async def run() -> None:
        core, told = Core(), asyncio.Queue[ev.Event]()
        engines: Engines = core.engines
        core.handle(ev.SessionOpened(SEAT, "s", 1), 0.0)
        core.handle(ev.SessionOpened(ev.Seat("e", "worker", 0), "w", 1), 0.0)
        core.handle(ev.RankRegistered("e", 0, 1), 0.0)
        there = Destination(small_layout(), "127.0.0.1", 1, "e.1", 1, 1, 1)
        path = ReceiverPath(
            engines,
            Broken(),  # type: ignore[arg-type]
            lambda _: there,
            told.put_nowait,
            core.counters,
        )
        key = RequestKey("e", "r")
        blocks = (array("q", [1, 2, 3]),)
        request = Request(key, "x", 1, blocks, 40, 0, False, {"metaserver": "http://x/"}, 0.0)
        [started] = path.start(request)
        assert isinstance(started, ev.Started)
        reply = await asyncio.wait_for(told.get(), 30)
        assert isinstance(reply, ev.PrefillEnded)
        assert (reply.ok, reply.began, reply.over) == (False, True, False)
        assert core.counters["internal_errors"] == 1
        assert path.calls == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("descriptors", "calls"), [(1_024, 512), (20_000, 15_904), (-1, 0), (2**20, 2**20 - 4_096)]
)
def test_metaserver_calls_leave_descriptors_for_the_rest(
    monkeypatch: pytest.MonkeyPatch, descriptors: int, calls: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (descriptors, descriptors))
    assert max_connections() == calls
