"""What is asked: prompts of exact lengths, with beginnings of their own, the same in each run."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decoded.cluster.api import Api

_NOUNS = (
    *("river", "stone", "garden", "lantern", "market", "harbor", "winter", "paper", "bridge"),
    *("morning", "captain", "window", "story", "forest", "engine", "letter", "road", "doctor"),
    *("village", "summer", "cloud", "kitchen", "island", "horse", "teacher", "night"),
)
_BEGINNINGS = ("Yesterday", "Then", "Later", "Suddenly", "In the end", "At noon", "As agreed")
_TOKENS_PER_SENTENCE = 10

CAPITAL = "What is the capital of France?"
FOLLOW_UP = "And which river runs through it?"

ANSWER_TOKENS = 16
LONG_TOKENS = 1500
BATCH = 32


@dataclass(frozen=True)
class Question:
    """A prompt's token ids, and how many tokens are to come after them."""

    prompt: tuple[int, ...]
    answer_tokens: int = ANSWER_TOKENS

    @property
    def ids(self) -> list[int]:
        return list(self.prompt)


@dataclass(frozen=True)
class Questions:
    """All that is asked in the acceptance, as token ids.

    `batch`: 5 to 1,500 tokens. `short`: less than a block. `whole_blocks`: whole blocks and
    one token more, so that a cache can hold all but the last. `crowd`: many short ones.
    `long`: 1,500 tokens each; `probes`: what is asked after something went wrong.
    `chat`: the first turn of a conversation, longer than a few blocks.
    """

    batch: Sequence[Question]
    short: Sequence[Question]
    whole_blocks: Question
    crowd: Sequence[Question]
    long: Sequence[Question]
    probes: Sequence[Question]
    chat: Sequence[Mapping[str, str]]

    def answered(self) -> list[Question]:
        """Those whose answers are compared."""
        groups = (self.batch, self.short, [self.whole_blocks], self.crowd, self.probes, self.long)
        return [question for group in groups for question in group]


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    batch: int = BATCH
    crowd: int = 50
    virtual: int = 200


async def make_questions(api: Api, block_size: int, size: Size) -> Questions:
    """Write the texts, and have the engine at `api` cut them into tokens."""
    maker = _Maker(api)
    # More short ones than long ones: the long ones take the time.
    steps = [(k / max(size.batch - 1, 1)) ** 3 for k in range(size.batch)]
    lengths = [5 + round((LONG_TOKENS - 5) * step) for step in steps]
    return Questions(
        batch=[await maker.make(length) for length in lengths],
        short=[await maker.make(length) for length in (1, 2, block_size // 2, block_size - 1)],
        whole_blocks=await maker.make(4 * block_size + 1),
        crowd=[await maker.make(20 + 3 * k, 8) for k in range(size.crowd)],
        long=[await maker.make(LONG_TOKENS) for _ in range(2)],
        probes=[await maker.make(3 * block_size + k) for k in range(8)],
        chat=[{"role": "user", "content": maker.text(20) + " " + CAPITAL}],
    )


class _Maker:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._random = random.Random(20)
        self._made = 0

    async def make(self, length: int, answer_tokens: int = ANSWER_TOKENS) -> Question:
        self._made += 1
        text = f"{self._made}. {self.text(length // _TOKENS_PER_SENTENCE + 2)}"
        ids = await self._api.tokenize(text)
        if len(ids) < length:
            raise RuntimeError(f"{len(ids)} tokens where {length} are wanted: {text!r}")
        return Question(tuple(ids[:length]), answer_tokens)

    def text(self, sentences: int) -> str:
        return " ".join(self._sentence() for _ in range(sentences))

    def _sentence(self) -> str:
        draw = self._random
        one, two, three, four = draw.sample(_NOUNS, 4)
        return (
            f"{draw.choice(_BEGINNINGS)} the {one} and the {two} of {draw.randint(2, 99)} "
            f"{three}s met near the {four}."
        )
