"""The batch: what each request is, and how it has to end. Without torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from decoded.wire.link import OutcomeState

from .shape import BLOCK_SIZE, SHAPE

SEED = 20_260_802
NEW_TOKENS = 12
D_BLOCKS = 160
P_BLOCKS = 160
ENGINE_ID = "demo-engine"

Arrangement = Literal["engine", "daemon", "transfer"]
"""Whose D's KV memory is: the engine's, shared with the daemon; the daemon's, mapped by the
engine; or the engine's alone, which then runs Mooncake itself."""


@dataclass(frozen=True)
class Request:
    """One request of the batch.

    `cached_tokens`: tokens at the start of `prompt` that D holds from request `after`,
    which has to be done before. `scattered`: neither P's nor D's blocks are in a row.
    `pause_at`, `fail_at`: P stops before it computes this layer, to be told to go on
    or because it breaks.
    """

    external_id: str
    kind: str
    prompt: Sequence[int] = field(repr=False)
    state: OutcomeState = "done"
    reason: str = "received"
    virtual: bool = False
    scattered: bool = False
    cached_tokens: int = 0
    after: str | None = None
    pause_at: int | None = None
    fail_at: int | None = None

    @property
    def request_id(self) -> str:
        """The engine's internal id: the external one with a suffix of its own, as in vLLM."""
        return f"{self.external_id}-{random.Random(self.external_id).getrandbits(32):08x}"

    @property
    def blocks(self) -> int:
        """How many blocks the prompt takes."""
        return -(-len(self.prompt) // BLOCK_SIZE)

    @property
    def cached_blocks(self) -> int:
        return self.cached_tokens // BLOCK_SIZE

    @property
    def pushed(self) -> bool:
        """Whether P has anything to do with it."""
        return not self.virtual and self.cached_tokens < len(self.prompt)

    @property
    def decoded(self) -> bool:
        """Whether D goes on from the KV it has. That of a virtual request is not there."""
        return self.state == "done" and not self.virtual


def make_batch(seed: int = SEED) -> list[Request]:
    """The batch; the same in every process."""
    draw = random.Random(seed)

    def prompt(tokens: int) -> list[int]:
        return [draw.randrange(1, SHAPE.vocab) for _ in range(tokens)]

    shared = prompt(6 * BLOCK_SIZE)
    return [
        Request("short", "shorter than a block", prompt(7)),
        Request("block", "exactly one block", prompt(BLOCK_SIZE)),
        Request("partial", "last block in part", prompt(45)),
        Request("long", "many blocks", prompt(38 * BLOCK_SIZE + 3)),
        Request("scattered", "blocks not in a row", prompt(333), scattered=True),
        Request("prefix", "prefix for others", shared + prompt(9)),
        Request("virtual-1", "virtual", prompt(5), reason="virtual", virtual=True),
        Request("virtual-2", "virtual", prompt(64), reason="virtual", virtual=True),
        Request("virtual-3", "virtual", prompt(170), reason="virtual", virtual=True),
        Request(
            "cancelled",
            "cancelled mid-push",
            prompt(120),
            state="cancelled",
            reason="cancelled",
            pause_at=4,
        ),
        Request(
            "broken",
            "P fails mid-push",
            prompt(100),
            state="failed",
            reason="sender_failed",
            fail_at=6,
        ),
        Request(
            "cached",
            "cached prefix",
            shared + prompt(70),
            cached_tokens=len(shared),
            after="prefix",
        ),
        Request(
            "all-cached",
            "all of it cached",
            shared,
            reason="nothing_to_fetch",
            cached_tokens=len(shared),
            after="prefix",
        ),
    ]
