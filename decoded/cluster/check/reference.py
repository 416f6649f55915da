"""One engine that stands alone: its answers are the right ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decoded.cluster.api import Api, Choice
from decoded.cluster.cores import share_cores
from decoded.cluster.nodes import engine
from decoded.cluster.plan import Plan
from decoded.cluster.ports import free_ports
from decoded.cluster.show import View

from .questions import FOLLOW_UP, Question, Questions, Size, make_questions
from .verdict import expect

AT_ONCE = 8
CHAT_TOKENS = 24


@dataclass
class Reference:
    """What one engine alone has answered.

    `answers`: by question. `chat`: of both turns of the conversation. `capital`: to the
    question for France's. `first_s`: seconds to the first token of the long questions,
    asked one after the other.
    """

    questions: Questions
    answers: dict[Question, Choice] = field(default_factory=dict)
    chat: list[Choice] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def check(self, question: Question, choice: Choice) -> None:
        """Raises WrongError if this is not the answer, token by token."""
        right = self.answers[question]
        if choice.tokens == right.tokens:
            return
        same = _same(choice.tokens, right.tokens)
        gap = f"{right.gaps[same]:.4f}" if same < len(right.gaps) else "unknown"
        expect(
            False,
            f"a prompt of {len(question.prompt)} tokens is answered otherwise from token {same} "
            f"on, {choice.tokens[same:]} for {right.tokens[same:]}, where the likeliest token of "
            f"one engine alone led by {gap} in log probability",
        )


async def collect(plan: Plan, size: Size, folder: Path, view: View) -> Reference:
    """Ask an engine with the plan's settings and no connector. Raises ClusterError, ApiError."""
    [port] = free_ports(1)
    [cores] = share_cores(1, 1, plan.tp)[1]
    async with engine(plan, "alone", port, None, cores, folder) as alone:
        view.expect(["alone"])
        try:
            await alone.start(view)
        finally:
            view.close()
        view.note("Collecting the answers of one engine alone")
        questions = await make_questions(alone.api, plan.block_size, size)
        reference = Reference(questions)
        reference.first_s = await first_token_s(alone.api, questions.long)
        asked = questions.answered()
        choices = await ask_all(alone.api, asked, logprobs=2)
        reference.answers = dict(zip(asked, choices, strict=True))
        reference.chat = await converse(alone.api, questions)
        return reference


async def ask_all(
    api: Api, questions: Sequence[Question], at_once: int = AT_ONCE, **more: object
) -> list[Choice]:
    """Greedy answers to all of them, so many at once."""
    free = asyncio.Semaphore(at_once)

    async def ask(question: Question) -> Choice:
        async with free:
            [choice] = await api.complete(
                question.ids, question.answer_tokens, ignore_eos=True, **more
            )
            return choice

    return list(await asyncio.gather(*(ask(question) for question in questions)))


async def converse(api: Api, questions: Questions) -> list[Choice]:
    """Both turns of the conversation; the second holds the first one's answer."""
    messages = list(questions.chat)
    first = await api.chat(messages, CHAT_TOKENS)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": FOLLOW_UP},
    ]
    return [first, await api.chat(messages, CHAT_TOKENS)]


async def first_token_s(api: Api, questions: Iterable[Question]) -> list[float]:
    """Seconds to the first token of each, one after the other."""
    return [(await api.stream(one.ids, 2, ignore_eos=True)).times[0] for one in questions]


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
