"""The shapes that a completion may take: several answers, several prompts, a stream."""

from __future__ import annotations

from decoded.cluster.check.stage import Stage
from decoded.cluster.check.verdict import expect

from .scenario import Scenario


async def two_answers(stage: Stage) -> str:
    """`n` of 2, with sampling that has only the likeliest token to draw from."""
    question = stage.questions.probes[0]
    choices = await stage.api.complete(
        question.ids, question.answer_tokens, ignore_eos=True, n=2, temperature=1, top_k=1
    )
    stage.check_all([question, question], choices)
    return "2 answers equal"


async def several_prompts(stage: Stage) -> str:
    questions = stage.questions.probes[1:4]
    choices = await stage.api.complete(
        [question.ids for question in questions], questions[0].answer_tokens, ignore_eos=True
    )
    stage.check_all(questions, choices)
    return f"{len(choices)} answers equal, in order"


async def streaming(stage: Stage) -> str:
    question = stage.questions.probes[4]
    streamed = await stage.api.stream(question.ids, question.answer_tokens, ignore_eos=True)
    stage.check_all([question], [streamed.choice])
    chunks = len(streamed.times)
    expect(chunks > 1, "the answer came in one piece")
    return f"{question.answer_tokens} tokens in {chunks} chunks"


SCENARIOS = (
    Scenario("n = 2", "two answers to one prompt", two_answers),
    Scenario("list of prompts", "several prompts in one request", several_prompts),
    Scenario("streaming", "an answer in pieces", streaming),
)
