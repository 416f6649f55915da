"""Where scenarios play: a cluster, the right answers, and what they need again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from decoded.cli.query import NoDaemonError
from decoded.cluster.api import Api, Choice, Counters
from decoded.cluster.cluster import Cluster
from decoded.cluster.nodes import Node
from decoded.cluster.plan import Policy

from .questions import Question, Size
from .reference import Reference, ask_all
from .verdict import WrongError, expect

_LOOK_EVERY_S = 0.01
_TRIES = 5
# A drain lasts as long as a write may, and P engines give up a request in their own time.
_QUIET_WITHIN_S = 45.0


@dataclass
class Work:
    """What engines did between two looks at their counters: prompt tokens of either side."""

    p_computed: int = 0
    p_cached: int = 0
    d_computed: int = 0
    d_cached: int = 0
    d_received: int = 0
    preemptions: int = 0


class Stage:
    """`cluster`: started, with as many P engines as `p_running` says."""

    def __init__(self, cluster: Cluster, reference: Reference, size: Size) -> None:
        self.cluster = cluster
        self.reference = reference
        self.questions = reference.questions
        self.size = size
        self._probed = 0

    @property
    def api(self) -> Api:
        """The proxy."""
        return self.cluster.proxy.api

    @property
    def d(self) -> Node:
        return self.cluster.d[0]

    @property
    def running_p(self) -> list[Node]:
        return [node for node in self.cluster.p if node.child.running]

    @property
    def running(self) -> list[Node]:
        """All engines that run."""
        return [*self.running_p, *self.cluster.d]

    # What scenarios need before they begin

    async def want(self, policy: Policy, p: int | None = None) -> None:
        """Have D engines with this policy; `p`: and at least so many P engines."""
        if self.cluster.plan.policy != policy:
            await self.cluster.replace_d(policy)
        stopped = [node for node in self.cluster.p if not node.child.running]
        for node in stopped[: max((p or 0) - len(self.running_p), 0)]:
            await self.cluster.start_node(node)

    async def fresh(self) -> None:
        """Wait until nobody holds a block, and empty every prefix cache."""
        for node in self.running:
            await self.until(node.api.reset_prefix_cache, f"{node.name} still holds KV blocks")

    async def until(
        self,
        holds: Callable[[], Awaitable[bool]],
        otherwise: str,
        within_s: float = _QUIET_WITHIN_S,
    ) -> None:
        """Wait for something.

        Raises WrongError if it does not come, ClusterError if a process dies.
        """
        deadline = time.monotonic() + within_s
        while not await holds():
            self.cluster.check()
            expect(time.monotonic() < deadline, f"{otherwise}, {within_s:g} s later")
            await asyncio.sleep(_LOOK_EVERY_S)

    # Asking, and looking at what was done

    async def same(self, questions: Sequence[Question], at_once: int = 8) -> None:
        """Ask all of them, and hold each answer against that of one engine alone."""
        choices = await ask_all(self.api, questions, at_once)
        self.check_all(questions, choices)

    def check_all(self, questions: Sequence[Question], choices: Sequence[Choice]) -> None:
        """Raises WrongError if any of these is not the answer to its question."""
        expect(
            len(questions) == len(choices),
            f"{len(choices)} answers came to {len(questions)} questions",
        )
        wrong: list[str] = []
        for question, choice in zip(questions, choices, strict=True):
            try:
                self.reference.check(question, choice)
            except WrongError as error:
                wrong.append(str(error))
        expect(not wrong, f"{len(wrong)} of {len(questions)} differ: {'; '.join(wrong[:3])}")

    async def probe(self) -> None:
        """A question that was not asked since the last one; its answer has to be right."""
        probes = self.questions.probes
        question = probes[self._probed % len(probes)]
        self._probed += 1
        await self.same([question])

    @asynccontextmanager
    async def work(self) -> AsyncIterator[Work]:
        """What is done inside; filled in at its end."""
        p, d = self.running_p, self.cluster.d
        before = [await _counters(side) for side in (p, d)]
        done = Work()
        yield done
        # D may have answered before P has counted.
        await self.until(self._idle, "engines are still busy")
        after = [await _counters(side) for side in (p, d)]
        (p_before, d_before), (p_after, d_after) = before, after
        done.p_computed = _more(p_before, p_after, lambda one: one.computed)
        done.p_cached = _more(p_before, p_after, lambda one: one.cached)
        done.d_computed = _more(d_before, d_after, lambda one: one.computed)
        done.d_cached = _more(d_before, d_after, lambda one: one.cached)
        done.d_received = _more(d_before, d_after, lambda one: one.received)
        done.preemptions = _more(p_before + d_before, p_after + d_after, lambda c: c.preemptions)

    async def in_flight(self) -> list[dict[str, Any]]:
        """The daemon's requests in flight, as `decoded status` has them."""
        with contextlib.suppress(NoDaemonError):
            return list((await self.cluster.status())["requests"])
        return []

    @asynccontextmanager
    async def caught(
        self, question: Question, there: Callable[[], Awaitable[bool]], what: str
    ) -> AsyncIterator[asyncio.Task[list[Choice]]]:
        """A request that has got there inside, and has ended or is aborted after that.

        One that was answered before it was seen there is asked again, a few times, from the
        beginning; after that it is a WrongError that `what` was never seen.
        """
        for _ in range(_TRIES):
            await self.fresh()
            async with self._asking(question) as asked:
                if await self._seen(asked, there, what):
                    yield asked
                    return
        raise WrongError(f"{_TRIES} requests were answered before {what} was seen")

    @asynccontextmanager
    async def _asking(self, question: Question) -> AsyncIterator[asyncio.Task[list[Choice]]]:
        call = self.api.complete(question.ids, question.answer_tokens, ignore_eos=True)
        task = asyncio.create_task(call)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # whoever wanted it has had it

    async def _seen(
        self, asked: asyncio.Task[Any], there: Callable[[], Awaitable[bool]], what: str
    ) -> bool:
        async def over() -> bool:
            return asked.done() or await there()

        await self.until(over, f"{what} is not seen")
        return not asked.done()

    async def _idle(self) -> bool:
        """P has answered the proxy, by which time it has counted; and no engine has a request."""
        health = json.loads(await self.api.get("/health"))
        if any(node["legs"] for side in ("decode", "prefill") for node in health[side]):
            return False
        counters = await _counters(self.running)
        return not any(one.running + one.waiting for one in counters)


async def _counters(nodes: Sequence[Node]) -> list[Counters]:
    return [await node.api.counters() for node in nodes]


def _more(
    before: Sequence[Counters], after: Sequence[Counters], what: Callable[[Counters], int]
) -> int:
    return sum(map(what, after)) - sum(map(what, before))
