"""Processes that are killed with -9 while a request hangs on them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from decoded.cluster.api import ApiError, Choice
from decoded.cluster.check.stage import Stage
from decoded.cluster.check.verdict import expect
from decoded.cluster.nodes import Node

from .scenario import Scenario
from .virtual import expect_virtual

_FAILS_WITHIN_S = 15.0
_ENDS_WITHIN_S = 90.0


async def p_killed_recompute(stage: Stage) -> str:
    seconds = await _p_killed(stage, answered=True)
    return f"the right answer {seconds:.1f} s after the kill, and the next one from another P"


async def p_killed_fail(stage: Stage) -> str:
    seconds = await _p_killed(stage, answered=False)
    return f"an error {seconds:.1f} s after the kill, and the next answer from another P"


async def daemon_killed_recompute(stage: Stage) -> str:
    seconds = await _daemon_killed(stage, answered=True)
    return f"D stayed up; the right answer {seconds:.1f} s after the kill"


async def daemon_killed_fail(stage: Stage) -> str:
    seconds = await _daemon_killed(stage, answered=False)
    return f"D stayed up; the request ended {seconds:.1f} s after the kill"


async def virtual_alone(stage: Stage) -> str:
    """No P engine runs at all."""
    for node in stage.running_p:
        await node.stop()
    questions = stage.questions.crowd[:8]
    for question in questions:
        await expect_virtual(stage, question)
    return f"{len(questions)} answered, with no P engine running"


async def _p_killed(stage: Stage, answered: bool) -> float:
    async with _prefilling(stage) as (asked, victim):
        await victim.child.kill()
        killed = time.monotonic()
        limit_s = _ENDS_WITHIN_S if answered else _FAILS_WITHIN_S
        await _ended(stage, asked, answered, limit_s)
        seconds = time.monotonic() - killed
    async with stage.work() as work:
        await stage.probe()
    expect(work.p_computed > 0, "no P engine prefilled the next request")
    return seconds


async def _daemon_killed(stage: Stage, answered: bool) -> float:
    async with _prefilling(stage) as (asked, _):
        await stage.cluster.daemon.kill()
        killed = time.monotonic()
        await stage.cluster.start_daemon()
        # The engine submits it again when the daemon is back: it may yet be answered.
        await _ended(stage, asked, answered, _ENDS_WITHIN_S, may_be_answered=True)
        seconds = time.monotonic() - killed
    await _received_again(stage)
    return seconds


@asynccontextmanager
async def _prefilling(stage: Stage) -> AsyncIterator[tuple[asyncio.Task[list[Choice]], Node]]:
    """A request, and the P engine that is in the middle of its prefill."""
    busy: list[Node] = []

    async def there() -> bool:
        busy[:] = [n for n in stage.running_p if (await n.api.counters()).running]
        return bool(busy)

    async with stage.caught(stage.questions.long[1], there, "a prefill") as asked:
        yield asked, busy[0]


async def _ended(
    stage: Stage,
    asked: asyncio.Task[list[Choice]],
    answered: bool,
    limit_s: float,
    may_be_answered: bool = False,
) -> None:
    done, _ = await asyncio.wait([asked], timeout=limit_s)
    expect(bool(done), f"the request has not ended {limit_s:g} s after the kill")
    error = asked.exception()
    if error is None:
        expect(answered or may_be_answered, "the request was answered, against the policy")
        stage.check_all([stage.questions.long[1]], asked.result())
        return
    expect(isinstance(error, ApiError), f"the request ended with {error!r}")
    expect(not answered, f"the request failed, against the policy: {error}")


async def _received_again(stage: Stage) -> None:
    """The next requests go through P and the daemon again, soon; none of them is lost."""

    async def there() -> bool:
        async with stage.work() as work:
            await stage.probe()
        return work.d_received > 0

    await stage.until(there, "D receives no KV again")
    stage.cluster.check()


SCENARIOS = (
    Scenario("P killed, recompute", "D computes what P did not", p_killed_recompute, p=2),
    Scenario("daemon killed, recompute", "D goes on without a daemon", daemon_killed_recompute),
    Scenario("P killed, fail", "an error soon, then on with another P", p_killed_fail, "fail", p=2),
    Scenario("daemon killed, fail", "the request ends, D stays", daemon_killed_fail, "fail"),
    Scenario("virtual alone", "virtual requests need no P", virtual_alone, "fail", p=0),
)
