"""Long lives: what a busy daemon sees, thousands of events on end, mostly sensible ones.

Hypothesis finds short, odd sequences; these walks reach full logs, forgotten
tombstones and registrations that come and go under load.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from decoded.core import events as ev
from decoded.core.request import RequestKey

from .record import Use
from .side_by_side import ENGINES, SideBySide

EVENTS = 3_000


class Walk:
    """Draws the next event from what is going on in `pair`."""

    def __init__(self, seed: int) -> None:
        self.trace: list[str] = []
        self.pair = SideBySide(self.trace.append)
        self.draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.pair.world = {engine: self.draw.randint(1, 3) for engine in ENGINES}
        for engine in ENGINES:
            self.pair.come_up(engine, "s0", self.draw.random() < 0.5)

    def step(self) -> None:
        weights = {
            self.submits: 20,
            self.path_speaks: 20,
            self.sender_speaks: 30,
            self.all_senders_speak: 5,
            self.prefill_ends: 8,
            self.engine_cancels: 3,
            self.seat_acknowledges: 12,
            self.time_passes: 25,
            self.session_changes: 2,
            self.registration_changes: 2,
            self.scheduler_changes: 0.5,
            self.same_again: 4,
        }
        move = self.draw.choices(list(weights), list(weights.values()))[0]
        move()

    def feed(self, event: ev.Event) -> None:
        self.last = event
        self.seen.update(type(effect).__name__ for effect in self.pair.feed(event))

    def live(self, *phases: str) -> Use | None:
        live = [use for use in self.pair.naive.live() if use.phase in phases]
        return self.draw.choice(live) if live else None

    def same_again(self) -> None:
        self.pair.feed(self.last)

    def submits(self) -> None:
        number = self.draw.randint(1, 6)
        key = RequestKey(self.draw.choice(ENGINES), f"r{number}")
        past = [use.attempt for use in self.pair.naive.uses if use.key == key][-1:] or [1]
        attempt = max(1, past[0] + self.draw.choice((-1, 0, 0, 1, 1)))
        external = f"x{number if self.draw.random() < 0.9 else self.draw.randint(1, 6)}"
        virtual = self.draw.random() < 0.2
        wish = self.draw.choice((None, None, 15.0))
        blocks = (array("q", [number]),)
        self.feed(ev.Submit(key, external, attempt, blocks, 16, 0, virtual, {}, wish))

    def path_speaks(self) -> None:
        use = self.live("accepted")
        if use is None:
            return
        about = use.key, use.attempt
        if use.virtual:
            self.feed(ev.Fulfilled(*about, "virtual"))
        elif self.draw.random() < 0.2:
            self.feed(ev.Deferred(*about))
        elif self.draw.random() < 0.05:
            self.feed(ev.StartFailed(*about, "bad_blocks", "none such"))
        else:
            self.feed(self.pair.started_event(*about))

    def sender_speaks(self) -> None:
        use = self.live("receiving", "draining")
        if self.draw.random() < 0.1 and self.pair.naive.ended:
            use = self.draw.choice(self.pair.naive.ended[-5:])
        if use is None:
            return
        of = 2 if use.external > "x3" else 1
        rank = self.draw.randrange(use.ranks or 1)
        words = use.key.engine_id, rank, use.external, of, f"p{self.draw.randint(1, of)}"
        kind = self.draw.choices((ev.SenderDone, ev.SenderFailed), (10, 1))[0]
        if self.draw.random() < 0.3:
            self.feed(ev.LayersIn(*words, self.draw.randint(0, 7), 1))
        else:
            self.feed(kind(*words))

    def all_senders_speak(self) -> None:
        use = self.live("receiving", "draining")
        if use is not None:
            for rank in range(use.ranks):
                for sender in ("p1", "p2"):
                    self.feed(ev.SenderDone(use.key.engine_id, rank, use.external, 2, sender))

    def prefill_ends(self) -> None:
        use = self.live("receiving", "draining")
        if use is not None:
            ok, over = self.draw.random() < 0.7, self.draw.random() < 0.8
            began = ok or self.draw.random() < 0.5
            self.feed(ev.PrefillEnded(use.key, use.attempt, ok, began, "HTTP", over))

    def engine_cancels(self) -> None:
        use = self.live("accepted", "receiving", "draining")
        if use is not None:
            self.feed(ev.Cancel(use.key, self.draw.choice((None, use.attempt))))

    def seat_acknowledges(self) -> None:
        houses = [house for house in self.pair.naive.houses.values() if house.log.readers]
        if houses:
            house = self.draw.choice(houses)
            seat = self.draw.choice(sorted(house.log.readers))
            seq = len(house.log.outcomes) - self.draw.choice((0, 0, 1, 2))
            self.feed(ev.Acknowledged(seat, house.log.number, seq))

    def time_passes(self) -> None:
        due = self.pair.core.next_deadline()
        if due is not None and self.draw.random() < 0.2:
            self.pair.now = max(self.pair.now, due)
        else:
            self.pair.now += self.draw.choice((0.01, 0.1, 1.0, 2.0, 4.0))
        self.feed(ev.Tick())

    def session_changes(self) -> None:
        engine = self.draw.choice(ENGINES)
        seat = ev.Seat(engine, "worker", self.draw.randrange(self.pair.world[engine]))
        house = self.pair.naive.houses.get(engine)
        session = house.sessions.get(seat, "s0") if house else "s0"
        if self.draw.random() < 0.5:
            self.feed(ev.SessionClosed(seat, session, "gone"))
        elif self.draw.random() < 0.3:
            session += "+"
        world = self.pair.world[engine]
        self.feed(ev.SessionOpened(seat, session, world, self.draw.random() < 0.5))

    def scheduler_changes(self) -> None:
        engine = self.draw.choice(ENGINES)
        seat = ev.Seat(engine, "scheduler", 0)
        house = self.pair.naive.houses.get(engine)
        session = house.last_scheduler if house else "s0"
        if self.draw.random() < 0.5:
            self.feed(ev.SessionClosed(seat, session or "s0", "gone"))
        if self.draw.random() < 0.5:
            session = f"s{len(self.trace)}"
        self.pair.come_up(engine, session or "s0", self.draw.random() < 0.5)

    def registration_changes(self) -> None:
        engine = self.draw.choice(ENGINES)
        rank = self.draw.randrange(self.pair.world[engine])
        choice = self.draw.random()
        if choice < 0.3:
            self.feed(ev.RankLost(engine, rank, "unregistered"))
        elif choice < 0.6:
            self.feed(ev.RankFenced(*self.draw.choice(self.pair.ever[-6:])))
        for missing in range(self.pair.world[engine]):
            house = self.pair.naive.houses.get(engine)
            if house and missing not in house.ranks:
                self.pair.register(engine, missing)


@pytest.mark.parametrize("seed", range(10))
def test_a_long_life_keeps_every_rule(seed: int) -> None:
    walk = Walk(seed)
    try:
        for _ in range(EVENTS):
            walk.step()
        walk.pair.finish()
    except AssertionError:
        print("\n".join(walk.trace[-60:]))
        raise
    ends = Counter(use.phase for use in walk.pair.naive.ended)
    assert set(ends) == {"done", "failed", "cancelled", "expired"}, ends
    assert walk.seen["Refuse"], walk.seen
    assert walk.seen["Resend"], walk.seen
