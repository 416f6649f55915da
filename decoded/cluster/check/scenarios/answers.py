"""The same answers as from one engine alone, and who computed what for them."""

from __future__ import annotations

from collections.abc import Sequence

from decoded.cluster.check.questions import CAPITAL, Question
from decoded.cluster.check.reference import AT_ONCE, converse
from decoded.cluster.check.stage import Stage, Work
from decoded.cluster.check.verdict import expect

from .scenario import Scenario


async def capital(stage: Stage) -> str:
    choice = await stage.api.chat([{"role": "user", "content": CAPITAL}], 24)
    expect("Paris" in choice.text, f"the answer is {choice.text!r}")
    return repr(choice.text)


async def batch(stage: Stage) -> str:
    """P prefills all of each prompt, in steps of at most so many tokens.

    D's counters tell the last token of a prompt, which it computes again, as received.
    """
    await stage.fresh()
    questions = stage.questions.batch
    async with stage.work() as work:
        await stage.same(questions, AT_ONCE)
    tokens = _tokens(questions)
    _expect_prefilled_by_p(work, questions)
    expect(work.p_cached == 0, f"P found {work.p_cached} of these tokens in its cache")
    step = stage.cluster.plan.step_tokens
    chunked = sum(len(question.prompt) > step for question in questions)
    expect(chunked > 0, f"no prompt is longer than the {step} tokens of a step")
    told = f"max_num_batched_tokens={step}"
    for node in stage.running_p:
        expect(told in node.child.words(), f"{node.name}'s log does not say {told}")
    return (
        f"{len(questions)} answers equal; P computed {work.p_computed:,} of {tokens:,} prompt "
        f"tokens, {chunked} prompts in steps of {step}; D received the KV of all, and computed "
        f"{work.d_computed} prompt tokens besides the last of each"
    )


async def second_turn(stage: Stage) -> str:
    """D holds a part of the second turn, and so does P: only the rest is computed and sent."""
    await stage.fresh()
    async with stage.work() as work:
        turns = await converse(stage.api, stage.questions)
    for turn, right in zip(turns, stage.reference.chat, strict=True):
        expect(turn.tokens == right.tokens, f"{turn.text!r} is answered, not {right.text!r}")
    expect(work.d_cached > 0, "D found nothing of the second turn in its cache")
    expect(work.p_cached > 0, "P found nothing of the second turn in its cache")
    expect(work.d_computed == 0, f"D computed {work.d_computed} prompt tokens by itself")
    return (
        f"D held {work.d_cached} tokens and was sent {work.d_received}; P held {work.p_cached}, "
        f"computed {work.p_computed}"
    )


async def short(stage: Stage) -> str:
    """Less than a block is sent too; a prompt of one token has nothing to send."""
    await stage.fresh()
    questions = stage.questions.short
    async with stage.work() as work:
        await stage.same(questions)
    several = [question for question in questions if len(question.prompt) > 1]
    expect(
        work.p_computed == _tokens(several),
        f"P computed {work.p_computed} of {_tokens(several)} prompt tokens",
    )
    alone = len(questions) - len(several)
    expect(work.d_computed == alone, f"D computed {work.d_computed} prompt tokens by itself")
    lengths = ", ".join(str(len(question.prompt)) for question in questions)
    return f"{lengths} tokens, blocks of {stage.cluster.plan.block_size}"


async def full_hit(stage: Stage) -> str:
    """Asked again, a prompt that D holds but for its last token needs no P engine."""
    await stage.fresh()
    question = stage.questions.whole_blocks
    await stage.same([question])
    async with stage.work() as work:
        await stage.same([question])
    held = len(question.prompt) - 1
    expect(work.p_computed == 0, f"P computed {work.p_computed} tokens")
    expect(work.d_cached == held, f"D found {work.d_cached} tokens of {held} in its cache")
    expect(work.d_computed == 1, f"D computed {work.d_computed} prompt tokens")
    return f"D held {held} of {len(question.prompt)} tokens; P computed none"


def _expect_prefilled_by_p(work: Work, questions: Sequence[Question]) -> None:
    tokens = _tokens(questions)
    expect(work.p_computed == tokens, f"P computed {work.p_computed} of {tokens} prompt tokens")
    expect(work.d_computed == 0, f"D computed {work.d_computed} prompt tokens by itself")
    expect(work.d_received == tokens, f"D received {work.d_received} of {tokens} prompt tokens")
    expect(work.preemptions == 0, f"{work.preemptions} requests were preempted")


def _tokens(questions: Sequence[Question]) -> int:
    return sum(len(question.prompt) for question in questions)


SCENARIOS = (
    Scenario("capital", "a question about the world is answered right", capital, real=True),
    Scenario("batch", "5 to 1,500 tokens, 8 at once, chunked on P: same tokens", batch),
    Scenario("second turn", "prefix caching on both sides: P sends only the rest", second_turn),
    Scenario("short", "prompts shorter than a block", short),
    Scenario("full hit", "a prompt that D holds already needs no P", full_hit),
)
