"""The core and the naive model side by side, with the house's rules checked at each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from decoded.core import Core, CoreSettings
from decoded.core import effects as ef
from decoded.core import events as ev
from decoded.core.request import RequestKey

from .naive import Naive
from .record import Use, summary

SETTINGS = CoreSettings(
    request_deadline_s=100.0,
    registration_deadline_s=20.0,
    done_deadline_s=10.0,
    prefill_timeout_s=60.0,
    transfer_timeout_s=30.0,
    drain_margin_s=1.0,
    sender_retry_window_s=3.5,
    max_requests=4,
    max_unacknowledged=5,
    max_senders_per_rank=3,
    max_layers=8,
    max_story=10,
    max_tombstones=3,
    tombstone_age_s=150.0,
)
ENGINES = ("e1", "e2")
MAX_RANKS = 3


class SideBySide:
    """`feed` is the only way in. `world` is each engine's number of ranks.

    `note` gets a line per event, to be shown when something is wrong.
    """

    def __init__(self, note: Callable[[str], object]) -> None:
        self._note = note
        self.core = Core(SETTINGS)
        self.naive = Naive(SETTINGS)
        self.now = 0.0
        self.world = dict.fromkeys(ENGINES, 1)
        self.ever: list[tuple[str, int, int]] = []
        self._running: set[tuple[RequestKey, int]] = set()
        self._freed: set[tuple[str, int, int]] = set()

    def feed(self, event: ev.Event) -> list[ef.Effect]:
        """Both take the event; their effects, states, deadlines and logs have to agree."""
        self._note(f"{self.now:g}: {event}")
        before = {id(h.log): len(h.log.outcomes) for h in self.naive.houses.values()}
        effects = self.core.handle(event, self.now)
        due = self.naive.step(event, self.now)
        assert summary(effects) == due, f"core only: {summary(effects) - due}; naive: {due}"
        self.core.check()
        self._check_effects(event, effects)
        self._follow_order(effects, before)
        self._compare()
        return effects

    def _check_effects(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """The rules that can be read off the effects and the record of what was said."""
        reported: list[tuple[RequestKey, int]] = []
        for effect in effects:
            if isinstance(effect, ef.Start):
                name = effect.request.key, effect.request.attempt
                assert name not in self._running, "started twice"
                self._running.add(name)
            elif isinstance(effect, ef.Report):
                reported.append((effect.request.key, effect.outcome.attempt))
                self._check_report(event, effect)
            elif isinstance(effect, ef.Stop):
                name = effect.request.key, effect.request.attempt
                assert reported[-1:] == [name], "Stop comes right after its Report"
                self._running.discard(name)
            elif isinstance(effect, ef.Release):
                self._check_release(effect)

    def _check_report(self, event: ev.Event, effect: ef.Report) -> None:
        (use,) = [u for u in self.naive.ended if u.ended_at == self.now and _is(u, effect)][-1:]
        assert effect.request.state.terminal
        assert effect.outcome.elapsed_s >= 0
        if not use.announced:
            return
        if effect.outcome.state.value == "done":
            assert use.whole()
            return
        # Rule 2: blocks go back only when no writer can be left.
        house_slots = self._open_slots(use)
        latest = use.drained_from
        if use.prefill == "running":
            latest = max(latest, use.started + SETTINGS.prefill_timeout_s)
        elif use.prefill_ended_at is not None:
            latest = min(latest, use.prefill_ended_at) if use.prefill == "ended" else latest
        assert (
            use.all_spoken()
            or (use.prefill == "never" and not use.words)
            or not house_slots
            or self.now >= latest + SETTINGS.transfer_timeout_s
        ), "its blocks went back while a writer may be left"

    def _open_slots(self, use: Use) -> list[tuple[int, int]]:
        house = self.naive.houses.get(use.key.engine_id)
        return [slot for slot in use.slots if house and slot in house.open_slots]

    def _check_release(self, effect: ef.Release) -> None:
        slot = effect.rank, effect.generation
        name = effect.engine_id, *slot
        for use in self.naive.live(effect.engine_id):
            assert slot not in use.slots, "a registration went away under a live request"
        house = self.naive.houses.get(effect.engine_id)
        assert house is None or house.ranks.get(effect.rank) != effect.generation
        self._freed.add(name)

    def _follow_order(self, effects: list[ef.Effect], before: dict[int, int]) -> None:
        """Outcomes of one turn may come in any order; take over the core's."""
        for engine, house in self.naive.houses.items():
            log, start = house.log, before.get(id(house.log), 0)
            reports = [
                effect
                for effect in effects
                if isinstance(effect, ef.Report)
                and effect.request.key.engine_id == engine
                and effect.seq
            ]
            told = [_told(report) for report in reports]
            assert Counter(told) == Counter(log.outcomes[start:])
            assert [r.seq for r in reports] == list(range(start + 1, start + 1 + len(reports)))
            log.outcomes[start:] = told

    def _compare(self) -> None:
        """States, deadlines and logs are those of the model."""
        core, naive = self.core, self.naive
        live = {use.key: use for use in naive.live()}
        assert core.ledger.live.keys() == live.keys()
        for key, use in live.items():
            request = core.ledger.live[key]
            assert (request.state.value, request.attempt) == (use.phase, use.attempt)
            assert request.deadline == use.deadline
        assert core.next_deadline() == min((u.deadline for u in live.values()), default=None)
        assert core.engines.by_id.keys() == naive.houses.keys()
        for engine_id, house in naive.houses.items():
            self._compare_log(engine_id, house.log.number)
        assert len(core.ledger.tombstones) <= SETTINGS.max_tombstones
        for request in core.ledger.tombstones.values():
            assert self.now <= request.ended_at + SETTINGS.tombstone_age_s
            assert len(core.story(request.key)) <= SETTINGS.max_story + 3 * 3 * SETTINGS.max_layers

    def _compare_log(self, engine_id: str, number: int) -> None:
        """Rule 8: for each reader, all that it has not acknowledged is there, in order."""
        log, told = self.core.engines.by_id[engine_id].log, self.naive.houses[engine_id].log
        assert log.log == number
        assert log.acknowledged == told.readers
        assert (log.last, len(log)) == (len(told.outcomes), len(told.kept))
        for acknowledged in told.readers.values():
            kept = log.since(acknowledged + 1, 1_000)
            assert [
                (o.request_id, o.attempt, o.state.value, o.reason) for o in kept
            ] == told.outcomes[acknowledged:]

    # Small scripts

    def come_up(self, engine_id: str, session: str, expect: bool) -> None:
        world = self.world[engine_id]
        self.feed(
            ev.SessionOpened(ev.Seat(engine_id, "scheduler", 0), session, world, True, expect)
        )
        for rank in range(world):
            self.feed(ev.SessionOpened(ev.Seat(engine_id, "worker", rank), session, world, expect))
            if rank not in self.naive.houses[engine_id].ranks:
                self.register(engine_id, rank)

    def register(self, engine_id: str, rank: int) -> None:
        registration = engine_id, rank, len(self.ever) + 1
        self.ever.append(registration)
        self.feed(ev.RankRegistered(*registration))

    def started_event(self, key: RequestKey, attempt: int) -> ev.Started:
        house = self.naive.houses.get(key.engine_id)
        newest = max(house.ranks.values(), default=0) if house else 0
        return ev.Started(key, attempt, self.world[key.engine_id], newest)

    def finish(self) -> None:
        """Nothing hangs: time alone ends every request, in bounded time and few ticks."""
        longest = SETTINGS.request_deadline_s + SETTINGS.prefill_timeout_s + SETTINGS.drain_s
        last = self.now + longest
        ticks = 0
        while (due := self.core.next_deadline()) is not None:
            self.now = max(self.now, due)
            assert self.now <= last
            self.feed(ev.Tick())
            ticks += 1
            assert ticks <= 4 * SETTINGS.max_requests
        assert not self.core.ledger.live
        assert not self._running, "every started path was stopped"
        assert all(not use.live for use in self.naive.uses)
        for engine_id, house in list(self.naive.houses.items()):
            for seat, session in list(house.sessions.items()):
                self.feed(ev.SessionClosed(seat, session, "bye"))
            assert engine_id not in self.core.engines.by_id, "nothing is left of an engine"
        assert set(self.ever) == self._freed, "every registration is given back"


def _is(use: Use, effect: ef.Report) -> bool:
    return (use.key, use.attempt) == (effect.request.key, effect.outcome.attempt)


def _told(report: ef.Report) -> tuple[str, int, str, str]:
    outcome = report.outcome
    return outcome.request_id, outcome.attempt, outcome.state.value, outcome.reason
