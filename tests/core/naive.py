"""The house's rules once more, as plainly as can be: lists, scans and if-else.

`Naive.step` takes what the core takes and says what the core has to do, without
its tables, heaps, indices or counts. It keeps everything that ever happened, and
checks what it is told of the core's effects against the raw record.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from decoded.core import CoreSettings
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


class Naive:
    """What the core is to do. `uses` are all accepted submits, oldest first."""

    def __init__(self, settings: CoreSettings) -> None:
        self.s = settings
        self.houses: dict[str, House] = {}
        self.uses: list[Use] = []
        self.ended: list[Use] = []
        self.logs = 0
        self.shutting = False
        self.now = 0.0
        self.due: Counter[Summary] = Counter()

    def step(self, event: ev.Event, now: float) -> Counter[Summary]:
        """The effects that are due, as a multiset."""
        self.now, self.due = now, Counter()
        getattr(self, f"on_{type(event).__name__}")(event)
        return self.due

    # Looking things up, the slow way

    def live(self, engine: str | None = None) -> list[Use]:
        return [u for u in self.uses if u.live and engine in (None, u.key.engine_id)]

    def live_at(self, key: RequestKey) -> Use | None:
        return next((u for u in self.live() if u.key == key), None)

    def handed(self, key: RequestKey, attempt: int) -> Use | None:
        use = self.live_at(key)
        return use if use and use.attempt == attempt and use.handed else None

    def tombstone(self, key: RequestKey) -> Use | None:
        """The last use of the key, if it is among those that are still remembered."""
        latest: list[RequestKey] = []
        for use in reversed(self.ended):
            if self.now > use.ended_at + self.s.tombstone_age_s:
                return None
            if use.key in latest:
                continue
            latest.append(use.key)
            if len(latest) > self.s.max_tombstones:
                return None
            if use.key == key:
                return use
        return None

    def earlier(self, engine: str, external: str) -> Use | None:
        """The last announced use of the external id, if it is still remembered."""
        latest: list[tuple[str, str]] = []
        for use in reversed(self.ended):
            here = use.key.engine_id, use.external
            if not use.announced or here in latest:
                continue
            if self.now > use.ended_at + self.s.tombstone_age_s:
                return None
            latest.append(here)
            if len(latest) > self.s.max_tombstones:
                return None
            if here == (engine, external):
                return use
        return None

    # Sessions and registrations

    def on_SessionOpened(self, event: ev.SessionOpened) -> None:
        seat = event.seat
        house = self.houses.get(seat.engine_id)
        if house is None:
            house = self.houses[seat.engine_id] = House(event.world_size, self.new_log())
        new = house.sessions.get(seat) not in (None, event.session)
        if seat.role == "worker" and new and seat.rank in house.ranks:
            self.lose(house, seat.engine_id, seat.rank)
        anew = seat.role == "scheduler" and house.last_scheduler not in (None, event.session)
        if anew:
            house.log = self.new_log()
        house.world = event.world_size
        house.sessions[seat] = event.session
        house.subscribed.discard(seat)
        if event.subscribe:
            house.subscribed.add(seat)
        if seat.role == "scheduler":
            house.last_scheduler, house.expect = event.session, event.expect_workers
        self.readers(seat.engine_id, house)
        if anew:
            self.all_of(seat.engine_id, "cancelled", "engine_restarted")
        at = house.log.readers.get(seat)
        if at is not None and at < len(house.log.outcomes):
            self.due["resend", seat, at + 1] += 1

    def new_log(self) -> Log:
        self.logs += 1
        return Log(self.logs)

    def on_SessionClosed(self, event: ev.SessionClosed) -> None:
        seat = event.seat
        house = self.houses.get(seat.engine_id)
        if house is None or house.sessions.get(seat) != event.session:
            return
        del house.sessions[seat]
        house.subscribed.discard(seat)
        self.readers(seat.engine_id, house)
        if seat.role == "scheduler":
            self.all_of(seat.engine_id, "cancelled", "engine_lost")
        elif seat.rank in house.ranks:
            self.lose(house, seat.engine_id, seat.rank)
        self.forget(seat.engine_id)

    def readers(self, engine: str, house: House) -> None:
        wanted = set(house.subscribed)
        if house.expect and ev.Seat(engine, "scheduler", 0) in house.sessions:
            wanted |= {ev.Seat(engine, "worker", rank) for rank in range(house.world)}
        log, old, who = house.log, dict(house.log.readers), dict(house.log.who)
        log.readers.clear()
        log.who.clear()
        for seat in wanted:
            here = house.sessions.get(seat)
            same = here is None or who.get(seat) in (None, here)
            log.readers[seat] = old[seat] if seat in old and same else log.trimmed
            log.who[seat] = here or who.get(seat)
        log.trim()

    def on_RankRegistered(self, event: ev.RankRegistered) -> None:
        engine, rank, generation = event.engine_id, event.rank, event.generation
        house = self.houses.get(engine)
        refused: Summary = ("release", engine, rank, generation)
        if house is None or ev.Seat(engine, "worker", rank) not in house.sessions:
            self.due[refused] += 1
            return
        if house.ranks.get(rank) == generation or (rank, generation) in house.retired:
            return
        before = [g for r, g in house.seen if r == rank]
        if generation <= max([house.announced, *before]):
            self.due[refused] += 1
            return
        if rank in house.ranks:
            self.lose(house, engine, rank)
        house.ranks[rank] = generation
        house.open_slots.add((rank, generation))
        house.seen.append((rank, generation))

    def on_RankLost(self, event: ev.RankLost) -> None:
        house = self.houses.get(event.engine_id)
        if house is not None and event.rank in house.ranks:
            self.lose(house, event.engine_id, event.rank)
            self.forget(event.engine_id)

    def on_RankFenced(self, event: ev.RankFenced) -> None:
        house = self.houses.get(event.engine_id)
        if house is not None:
            house.open_slots.discard((event.rank, event.generation))
            for use in self.live(event.engine_id):
                self.settle(use)

    def lose(self, house: House, engine: str, rank: int) -> None:
        generation = house.ranks.pop(rank)
        slot = rank, generation
        house.retired[slot] = [u for u in self.live(engine) if u.announced and slot in u.slots]
        self.due["fence", engine, rank, generation] += 1
        self.all_of(engine, "failed", "registration_lost", only="receiving")
        self.release(engine, house)

    def release(self, engine: str, house: House) -> None:
        for slot, users in list(house.retired.items()):
            if not any(use.live for use in users):
                del house.retired[slot]
                house.open_slots.discard(slot)
                self.due["release", engine, slot[0], slot[1]] += 1

    def forget(self, engine: str) -> None:
        house = self.houses.get(engine)
        if house and not (house.sessions or house.ranks or house.retired or self.live(engine)):
            del self.houses[engine]

    # Requests

    def on_Submit(self, event: ev.Submit) -> None:
        code = self.verdict(event)
        if code == "repeat":
            return
        if code:
            self.due["refuse", event.key, event.attempt, code] += 1
            return
        limit = self.s.request_deadline_s
        wish = limit if event.timeout_s is None else event.timeout_s
        expires = self.now + min(wish, limit)
        log = self.houses[event.key.engine_id].log
        use = Use(
            event.key,
            event.external_id,
            event.attempt,
            _content(event),
            event.virtual,
            log,
            expires,
            expires,
        )
        self.uses.append(use)
        self.hand_over(use)

    def verdict(self, event: ev.Submit) -> str:
        """Empty: accept. `repeat`: say nothing. Else the code of the refusal."""
        key = event.key
        house = self.houses.get(key.engine_id)
        if house is None:
            return "unknown_engine"
        live, log = self.live_at(key), house.log
        if live is not None:
            same = live.attempt == event.attempt and live.content == _content(event)
            return "repeat" if same and live.log is log else "live_duplicate"
        pending = [(n, told[1]) for n, told in log.kept if told[0] == key.request_id]
        newest = 0
        if pending:
            number, newest = pending[-1]
            read = log.readers.get(ev.Seat(key.engine_id, "scheduler", 0), log.trimmed)
            if newest == event.attempt and number > read:
                return "repeat"
        tombstone = self.tombstone(key)
        if tombstone is not None and tombstone.log is log:
            newest = max(newest, tombstone.attempt)
        if event.attempt < newest:
            return "stale_attempt"
        if self.shutting:
            return "shutting_down"
        if any(u.external == event.external_id for u in self.live(key.engine_id)):
            return "duplicate_external_id"
        if len(self.live()) >= self.s.max_requests:
            return "too_many_requests"
        if len(log.kept) >= self.s.max_unacknowledged:
            return "too_many_unacknowledged"
        return ""

    def hand_over(self, use: Use) -> None:
        quiet = self.quiet_at(use)
        if quiet > self.now and not use.virtual:
            use.deadline = min(quiet, use.expires)
            return
        use.handed = True
        use.deadline = use.expires
        self.due["start", use.key, use.attempt] += 1

    def quiet_at(self, use: Use) -> float:
        earlier = self.earlier(use.key.engine_id, use.external)
        last = earlier.last_word() if earlier else float("-inf")
        return last + self.s.sender_retry_window_s

    def on_Cancel(self, event: ev.Cancel) -> None:
        use = self.live_at(event.key)
        if use and event.attempt in (None, use.attempt):
            self.give_up(use, "cancelled", "cancelled")

    def on_Fulfilled(self, event: ev.Fulfilled) -> None:
        use = self.handed(event.key, event.attempt)
        if use and use.phase == "accepted":
            self.end(use, "done", event.why)

    def on_Deferred(self, event: ev.Deferred) -> None:
        use = self.handed(event.key, event.attempt)
        if use and use.phase == "accepted" and not use.deferred:
            use.deferred = True
            use.deadline = min(self.now + self.s.registration_deadline_s, use.expires)

    def on_Started(self, event: ev.Started) -> None:
        use = self.handed(event.key, event.attempt)
        if use is None or use.phase != "accepted":
            return
        house = self.houses[use.key.engine_id]
        here = [house.ranks.get(rank) for rank in range(event.ranks)]
        newest = max(house.ranks.values(), default=0)
        if not here or None in here or event.generation != newest:
            self.end(use, "failed", "registration_lost")
            return
        earlier = self.earlier(use.key.engine_id, use.external)
        if earlier and not (earlier.writers_gone() and self.quiet_at(use) <= self.now):
            self.end(use, "failed", "stale_writers")
            return
        use.phase, use.prefill, use.started = "receiving", "running", self.now
        use.ranks, use.generation, use.deadline = event.ranks, event.generation, use.expires
        # Producers may come by every rank: all that is registered now counts as used.
        use.slots = list(house.ranks.items())
        house.announced = event.generation

    def on_StartFailed(self, event: ev.StartFailed) -> None:
        use = self.handed(event.key, event.attempt)
        if use and use.phase == "accepted":
            self.end(use, "failed", event.reason)

    def on_PrefillEnded(self, event: ev.PrefillEnded) -> None:
        use = self.handed(event.key, event.attempt)
        if use is None or use.prefill != "running" or not event.over:
            return
        use.prefill = "ended" if event.ok or event.began else "never"
        use.prefill_ended_at = self.now
        if use.phase == "draining":
            use.deadline = min(use.deadline, self.now + self.drain_s)
            self.settle(use)
        elif event.ok:
            use.deadline = min(use.expires, self.now + self.s.done_deadline_s)
        else:
            self.give_up(use, "failed", "prefill_failed")

    # Senders

    def on_SenderDone(self, event: ev.SenderDone) -> None:
        self.spoke(event, "done")

    def on_SenderFailed(self, event: ev.SenderFailed) -> None:
        self.spoke(event, "failed")

    def on_LayersIn(self, event: ev.LayersIn) -> None:
        after = event.first + event.count
        if event.first >= 0 and event.count > 0 and after <= self.s.max_layers:
            self.spoke(event, "layers")

    def spoke(self, event: ev.SenderDone | ev.SenderFailed | ev.LayersIn, word: str) -> None:
        engine, external = event.engine_id, event.external_id
        use = next((u for u in self.live(engine) if u.external == external and u.announced), None)
        late = use is None
        if late and word != "layers":
            use = self.earlier(engine, external)
        if use is None or not 0 <= event.rank < use.ranks:
            return
        known = use.senders(event.rank)
        if event.sender not in known and len(known) >= self.s.max_senders_per_rank:
            return
        use.words.append((self.now, event.rank, event.sender, event.trans_count, word))
        if late:
            return
        if word == "failed" and use.phase == "receiving":
            self.give_up(use, "failed", "sender_failed")
        elif use.phase == "receiving" and word == "done" and use.whole():
            self.end(use, "done", "received")
        else:
            self.settle(use)

    # The rest

    def on_Acknowledged(self, event: ev.Acknowledged) -> None:
        house = self.houses.get(event.seat.engine_id)
        if house is None or event.log != house.log.number:
            return
        if event.seat not in house.log.readers:
            return
        if event.seq <= len(house.log.outcomes):
            readers = house.log.readers
            readers[event.seat] = max(readers[event.seat], event.seq)
            house.log.trim()

    def on_ShutdownBegan(self, event: ev.ShutdownBegan) -> None:
        self.shutting = True

    def on_ShutdownDue(self, event: ev.ShutdownDue) -> None:
        self.shutting = True
        for engine in list(self.houses):
            self.all_of(engine, "expired", "shutdown")

    def on_Tick(self, event: ev.Tick) -> None:
        for use in sorted(self.live(), key=lambda u: u.deadline):
            if use.deadline > self.now:
                continue
            if use.phase == "draining":
                self.end(use, use.ending, use.reason)
            elif use.phase == "accepted" and not use.handed and self.now < use.expires:
                self.hand_over(use)
            elif use.prefill == "ended":
                self.give_up(use, "expired", "done_overdue")
            elif use.phase == "accepted" and use.deferred:
                self.give_up(use, "expired", "kv_not_registered")
            else:
                self.give_up(use, "expired", "deadline")

    # Endings

    @property
    def drain_s(self) -> float:
        return self.s.transfer_timeout_s + self.s.drain_margin_s

    def all_of(self, engine: str, ending: str, reason: str, only: str = "") -> None:
        for use in self.live(engine):
            if only in ("", use.phase):
                self.give_up(use, ending, reason)

    def give_up(self, use: Use, ending: str, reason: str) -> None:
        if use.phase == "accepted":
            self.end(use, ending, reason)
        elif use.phase == "receiving":
            use.phase, use.ending, use.reason = "draining", ending, reason
            use.drained_from = self.now
            use.deadline = self.last_begin(use) + self.drain_s
            self.settle(use)

    def last_begin(self, use: Use) -> float:
        """The last moment at which a writer may begin."""
        if use.prefill == "running":
            return max(use.drained_from, use.started + self.s.prefill_timeout_s)
        return max(use.drained_from, use.prefill_ended_at or 0.0)

    def settle(self, use: Use) -> None:
        """End a drain when nobody can write any more."""
        if use.phase != "draining":
            return
        house = self.houses[use.key.engine_id]
        ways_in = [g for r, g in house.open_slots if r < use.ranks and g <= use.generation]
        if use.writers_gone() or not ways_in:
            self.end(use, use.ending, use.reason)

    def end(self, use: Use, phase: str, reason: str) -> None:
        use.phase, use.reason, use.ended_at = phase, reason, self.now
        self.ended.append(use)
        self.due["report", use.key, use.attempt, phase, reason] += 1
        self.due["stop", use.key, use.attempt] += 1
        engine = use.key.engine_id
        house = self.houses[engine]
        if house.log is use.log:
            house.log.outcomes.append((use.key.request_id, use.attempt, phase, reason))
            house.log.trim()
        self.release(engine, house)
        self.forget(engine)


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


def _content(event: ev.Submit) -> object:
    blocks = [list(group) for group in event.blocks]
    return event.external_id, blocks, event.prompt_tokens, event.cached_tokens, event.virtual
