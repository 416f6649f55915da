"""Clients that go away at each stage: no block is lost, and later answers are right."""

from __future__ import annotations

from decoded.cluster.check.stage import Stage
from decoded.cluster.check.verdict import expect

from .scenario import Scenario


async def parked(stage: Stage) -> str:
    """Prefill has been asked for, nothing has come yet."""

    async def there() -> bool:
        return any(one["state"] == "receiving" for one in await stage.in_flight())

    async with stage.caught(stage.questions.long[0], there, "a parked request"):
        pass
    return await _nothing_is_left(stage)


async def pushing(stage: Stage) -> str:
    """P has begun to write."""

    async def there() -> bool:
        flying = await stage.in_flight()
        return any(rank["senders"] for one in flying for rank in one["ranks"])

    async with stage.caught(stage.questions.long[0], there, "a push"):
        pass
    return await _nothing_is_left(stage)


async def decoding(stage: Stage) -> str:
    """D has begun to answer."""
    await stage.fresh()
    question = stage.questions.probes[5]
    chunks = stage.api.chunks(question.ids, 1000, ignore_eos=True)
    for _ in range(3):
        await anext(chunks)
    await chunks.aclose()
    return await _nothing_is_left(stage)


async def _nothing_is_left(stage: Stage) -> str:
    await stage.probe()
    await stage.fresh()
    for node in stage.running:
        counters = await node.api.counters()
        expect(counters.blocks_used == 0, f"{node.name} holds {counters.blocks_used:.2%} blocks")
        expect(counters.running + counters.waiting == 0, f"{node.name} still has requests")
    expect(not await stage.in_flight(), "the daemon still has requests")
    return "all blocks are free again; the next answer is right"


SCENARIOS = (
    Scenario("abort, parked", "a client leaves while prefill is awaited", parked),
    Scenario("abort, mid-push", "a client leaves while KV comes in", pushing),
    Scenario("abort, decoding", "a client leaves while it is answered", decoding),
)
