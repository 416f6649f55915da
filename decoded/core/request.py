"""What is known of one request: the record that the ledger keeps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from .states import State


class RequestKey(NamedTuple):
    """Names a request: the engine and the engine's internal request id."""

    engine_id: str
    request_id: str


class StoryEntry(NamedTuple):
    """One thing that happened to a request, at `time` (the core's clock, seconds)."""

    time: float
    what: str
    detail: str


class Prefill(Enum):
    """What the metaserver's call has told so far."""

    NOT_ASKED = "not asked"
    RUNNING = "running"
    ENDED = "ended"
    NEVER_RAN = "never ran"


@dataclass(slots=True)
class Outcome:
    """How one attempt of a request ended. `reason` is for machines, `detail` for people."""

    request_id: str
    external_id: str
    attempt: int
    state: State
    reason: str
    detail: str
    elapsed_s: float


class Verdict(Enum):
    """A sender's last word to a rank."""

    NONE = "pushing"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Layers `first` .. `first + count - 1` were reported in at `time`."""

    time: float
    first: int
    count: int


@dataclass(slots=True)
class SenderProgress:
    """What one sender has said to one rank. `layers` is a bit set of layer indices."""

    layers: int = 0
    verdict: Verdict = Verdict.NONE
    heard_at: float = 0.0
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(slots=True)
class RankProgress:
    """What one rank has heard. `expected` is the number of distinct senders, 0 while unknown."""

    expected: int = 0
    senders: dict[str, SenderProgress] = field(default_factory=dict)
    spoken: int = 0
    failed: int = 0

    @property
    def all_spoken(self) -> bool:
        return 0 < self.expected <= self.spoken

    @property
    def complete(self) -> bool:
        return self.all_spoken and not self.failed


@dataclass(slots=True, eq=False)
class Request:
    """One attempt at one request.

    `blocks` holds the block ids per KV group, the cached prefix included; it is
    emptied when the request ends. `params` are the engine's kv_transfer_params,
    `virtual` names the path: the core carries both and reads neither. `handed`:
    the path was told to start. `log` and `report_seq`: where its outcome is reported.
    """

    key: RequestKey
    external_id: str
    attempt: int
    blocks: tuple[array[int], ...]
    prompt_tokens: int
    cached_tokens: int
    virtual: bool
    params: Mapping[str, Any]
    submitted_at: float
    state: State = State.ACCEPTED
    handed: bool = False
    ending: State | None = None
    reason: str = ""
    detail: str = ""
    deadline: float = math.inf
    expires_at: float = 0.0
    started_at: float = 0.0
    drained_from: float = 0.0
    ended_at: float = 0.0
    ranks: int = 0
    generation: int = 0
    prefill: Prefill = Prefill.NOT_ASKED
    progress: dict[int, RankProgress] | None = None
    log: int = 0
    report_seq: int = 0
    # Plain tuples: the garbage collector stops looking at those, and there are many.
    story: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def announced(self) -> bool:
        """True once producers may know where to write."""
        return self.prefill is not Prefill.NOT_ASKED

    @property
    def last_word_at(self) -> float:
        """When a sender was last heard; minus infinity if none ever was."""
        ranks = (self.progress or {}).values()
        heard = (sender.heard_at for rank in ranks for sender in rank.senders.values())
        return max(heard, default=-math.inf)

    @property
    def writers_gone(self) -> bool:
        """True when nobody can write any more: no prefill began, or every sender has spoken."""
        if self.prefill in (Prefill.NOT_ASKED, Prefill.NEVER_RAN):
            return not self.progress or self._every_rank_spoken()
        return self._every_rank_spoken()

    @property
    def all_done(self) -> bool:
        """True when every rank has heard DONE from each of its distinct senders."""
        progress = self.progress
        return (
            progress is not None
            and len(progress) == self.ranks > 0
            and all(rank.complete for rank in progress.values())
        )

    def _every_rank_spoken(self) -> bool:
        progress = self.progress
        return (
            progress is not None
            and len(progress) == self.ranks > 0
            and all(rank.all_spoken for rank in progress.values())
        )

    def outcome(self) -> Outcome:
        """The outcome to report; only meaningful in a terminal state."""
        return Outcome(
            self.key.request_id,
            self.external_id,
            self.attempt,
            self.state,
            self.reason,
            self.detail,
            self.ended_at - self.submitted_at,
        )
