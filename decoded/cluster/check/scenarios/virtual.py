"""Virtual requests among real ones."""

from __future__ import annotations

import asyncio

from decoded.cluster.api import Choice
from decoded.cluster.check.questions import Question
from decoded.cluster.check.stage import Stage
from decoded.cluster.check.verdict import expect

from .scenario import Scenario

PARAMS = {"do_remote_prefill": True, "do_virtual": True}
_AT_ONCE = 64


async def crowd(stage: Stage) -> str:
    """Virtual and real requests in turn, many at once; the virtual ones have the real prompts."""
    await stage.fresh()
    real = stage.questions.crowd
    each = max(stage.size.virtual // len(real), 1)
    free = asyncio.Semaphore(_AT_ONCE)

    async def ask(question: Question, virtual: bool) -> Choice:
        more = {"kv_transfer_params": PARAMS} if virtual else {}
        async with free:
            [choice] = await stage.api.complete(
                question.ids, question.answer_tokens, ignore_eos=True, **more
            )
            return choice

    jobs = [ask(question, n < each) for question in real for n in range(each + 1)]
    async with stage.work() as work:
        choices = await asyncio.gather(*jobs)
    stage.check_all(real, choices[each :: each + 1])
    tokens = sum(len(question.prompt) for question in real)
    expect(
        work.p_computed + work.p_cached == tokens,
        f"P prefilled {work.p_computed + work.p_cached} tokens for {tokens} of real prompts",
    )
    if work.preemptions == 0:
        expect(work.d_computed == 0, f"D computed {work.d_computed} prompt tokens by itself")
    return f"{each * len(real)} virtual among {len(real)} real ones, whose answers are equal"


async def expect_virtual(stage: Stage, question: Question) -> None:
    """A virtual request is answered, with as many tokens as were asked for."""
    [choice] = await stage.api.complete(
        question.ids, question.answer_tokens, ignore_eos=True, kv_transfer_params=PARAMS
    )
    expect(
        len(choice.tokens) == question.answer_tokens,
        f"{len(choice.tokens)} tokens came for a virtual request, not {question.answer_tokens}",
    )


SCENARIOS = (Scenario("virtual crowd", "virtual requests leave real ones' tokens right", crowd),)
