"""Time to the first token of a long prompt, beside one engine alone."""

from __future__ import annotations

from decoded.cluster.check.reference import first_token_s
from decoded.cluster.check.stage import Stage

from .scenario import Scenario


async def first_token(stage: Stage) -> str:
    await stage.fresh()
    question = stage.questions.long[0]
    [seconds] = await first_token_s(stage.api, [question])
    alone = min(stage.reference.first_s)
    return f"{seconds:.2f} s for {len(question.prompt)} tokens; one engine alone {alone:.2f} s"


SCENARIOS = (Scenario("first token", "time to the first token, and its parts", first_token),)
