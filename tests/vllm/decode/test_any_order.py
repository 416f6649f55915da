"""Requests, aborts, answers, failures and daemon restarts in any order: no block is lost."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from decoded.testing import DaemonProcess
from tests.edges.proxy import Call, Proxy
from tests.vllm.engine import Engine

from .conftest import MakeEngine
from .test_engine import VIRTUAL, prompt_of, remote, say_done

ACTIONS = 150


class Walk:
    """Does one thing after the other to an engine, its daemon and its proxy."""

    def __init__(self, engine: Engine, daemon: DaemonProcess, proxy: Proxy, seed: int) -> None:
        self.engine, self.daemon, self.proxy = engine, daemon, proxy
        self.random = random.Random(seed)
        self.added: list[str] = []
        self.aborted: set[str] = set()
        self.calls: list[Call] = []

    def add(self) -> None:
        request_id = f"r{len(self.added)}-{len(self.added):08x}"
        params: Any = self.random.choice(
            [
                dict(VIRTUAL),
                remote(self.proxy),
                remote(self.proxy),
                None,
                {"do_remote_prefill": True, "metaserver": "no URL"},
            ]
        )
        prompt = prompt_of(self.random.randint(1, 200), 100 * self.random.randint(0, 3))
        self.engine.add(request_id, prompt, params, self.random.randint(1, 4))
        self.added.append(request_id)

    def abort(self) -> None:
        if self.added:
            request_id = self.random.choice(self.added)
            self.engine.abort(request_id)
            self.aborted.add(request_id)

    def answer(self) -> None:
        while self.proxy.waiting:
            self.calls.append(self.proxy.next())
        if self.calls:
            call = self.calls.pop(self.random.randrange(len(self.calls)))
            kind = self.random.choice(["done", "done", "unknown", "failed"])
            if kind == "done":
                # The request may be over, or the daemon another: P says so all the same.
                say_done(call.body, len(self.engine.workers), 500)
            call.answer({"done": 200, "unknown": 404, "failed": 502}[kind], "{}")

    def restart(self) -> None:
        self.daemon.kill()
        self.engine.step()
        self.daemon.start()

    def finish(self) -> None:
        due = time.monotonic() + 60
        while self.engine.scheduler.has_requests():
            assert time.monotonic() < due, self.engine.scheduler.requests
            self.engine.step()
            self.answer()


@pytest.mark.parametrize(
    ("seed", "ranks", "policy"),
    [(1, 1, "recompute"), (2, 1, "fail"), (3, 2, "recompute"), (4, 2, "fail")],
)
def test_any_order(
    make_engine: MakeEngine,
    daemon: DaemonProcess,
    proxy: Proxy,
    seed: int,
    ranks: int,
    policy: str,
) -> None:
    engine = make_engine(ranks=ranks, policy=policy)
    free = engine.free_blocks
    walk = Walk(engine, daemon, proxy, seed)
    weights = {walk.add: 30, engine.step: 50, walk.answer: 30, walk.abort: 8, walk.restart: 1}
    for action in walk.random.choices(list(weights), list(weights.values()), k=ACTIONS):
        action()
    walk.finish()
    assert engine.free_blocks == free
    scheduler = engine.connector._scheduler
    assert not scheduler._parked
    # Every request that nobody aborted has ended, with an error only where that is the policy.
    ended = {name for name in walk.added if name not in walk.aborted}
    assert ended <= engine.finished.keys()
    if policy == "recompute":
        assert {engine.finished[name] for name in ended} == {"length"}
    engine.add("last-ffffffff", prompt_of(100, 700), dict(VIRTUAL))
    engine.run()
    assert engine.tokens["last-ffffffff"] == [7, 7]
