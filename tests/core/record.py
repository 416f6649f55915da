"""What the naive model keeps: everything that ever happened to engines and requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from decoded.core import effects as ef
from decoded.core import events as ev
from decoded.core.request import RequestKey

Slot = tuple[int, int]  # rank, generation
Summary = tuple[object, ...]
Told = tuple[str, int, str, str]  # request id, attempt, state, reason


@dataclass(eq=False)
class Log:
    """Everything ever reported in one log, and how far each reader is."""

    number: int
    outcomes: list[Told] = field(default_factory=list)
    readers: dict[ev.Seat, int] = field(default_factory=dict)
    who: dict[ev.Seat, str | None] = field(default_factory=dict)
    trimmed: int = 0

    def trim(self) -> None:
        self.trimmed = max(self.trimmed, min(self.readers.values(), default=len(self.outcomes)))

    @property
    def kept(self) -> list[tuple[int, Told]]:
        return [(n, o) for n, o in enumerate(self.outcomes, 1) if n > self.trimmed]


@dataclass
class House:
    """One engine."""

    world: int
    log: Log
    sessions: dict[ev.Seat, str] = field(default_factory=dict)
    subscribed: set[ev.Seat] = field(default_factory=set)
    last_scheduler: str | None = None
    expect: bool = False
    ranks: dict[int, int] = field(default_factory=dict)
    retired: dict[Slot, list[Use]] = field(default_factory=dict)
    open_slots: set[Slot] = field(default_factory=set)
    seen: list[Slot] = field(default_factory=list)
    announced: int = 0


@dataclass(eq=False)
class Use:
    """One accepted submit, and all that is known of it."""

    key: RequestKey
    external: str
    attempt: int
    content: object
    virtual: bool
    log: Log
    expires: float
    deadline: float
    handed: bool = False
    deferred: bool = False
    phase: str = "accepted"
    ending: str = ""
    reason: str = ""
    ended_at: float = 0.0
    # From here on: only once it was announced.
    ranks: int = 0
    generation: int = 0
    started: float = 0.0
    slots: list[Slot] = field(default_factory=list)
    drained_from: float = 0.0
    prefill: str = ""
    prefill_ended_at: float | None = None
    words: list[tuple[float, int, str, int, str]] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.phase in ("accepted", "receiving", "draining")

    @property
    def announced(self) -> bool:
        return self.ranks > 0

    def senders(self, rank: int) -> set[str]:
        return {sender for _, at, sender, _, _ in self.words if at == rank}

    def spoke(self, rank: int, *said: str) -> set[str]:
        return {sender for _, at, sender, _, word in self.words if at == rank and word in said}

    def due(self, rank: int) -> int:
        return max((due for _, at, _, due, _ in self.words if at == rank), default=0)

    def all_spoken(self) -> bool:
        return all(
            0 < self.due(rank) <= len(self.spoke(rank, "done", "failed"))
            for rank in range(self.ranks)
        )

    def whole(self) -> bool:
        """Rule 3: distinct senders, per rank, and none of them failed."""
        return all(
            0 < self.due(rank) <= len(self.spoke(rank, "done")) and not self.spoke(rank, "failed")
            for rank in range(self.ranks)
        )

    def writers_gone(self) -> bool:
        return self.all_spoken() or (self.prefill == "never" and not self.words)

    def last_word(self) -> float:
        return max((time for time, *_ in self.words), default=float("-inf"))


def summary(effects: list[ef.Effect]) -> Counter[Summary]:
    """The core's effects in the words of `Naive.step`."""
    found: Counter[Summary] = Counter()
    for effect in effects:
        found[_summary(effect)] += 1
    return found


def _summary(effect: ef.Effect) -> Summary:
    if isinstance(effect, ef.Start):
        return "start", effect.request.key, effect.request.attempt
    if isinstance(effect, ef.Stop):
        return "stop", effect.request.key, effect.request.attempt
    if isinstance(effect, ef.Report):
        outcome = effect.outcome
        key = effect.request.key
        return "report", key, outcome.attempt, outcome.state.value, outcome.reason
    if isinstance(effect, ef.Refuse):
        return "refuse", effect.key, effect.attempt, effect.code
    if isinstance(effect, ef.Resend):
        return "resend", effect.seat, effect.first
    name = "fence" if isinstance(effect, ef.Fence) else "release"
    return name, effect.engine_id, effect.rank, effect.generation
