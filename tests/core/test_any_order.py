"""Every event in any order, with repeats and losses, against a naive model."""

from __future__ import annotations

from array import array

from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from decoded.core import effects as ef
from decoded.core import events as ev
from decoded.core.request import RequestKey

from .record import Use
from .side_by_side import ENGINES, MAX_RANKS, SideBySide

engine_ids = st.sampled_from(("e1", "e1", "e2"))
request_ids = st.sampled_from(("r1", "r2", "r3"))
external_ids = st.sampled_from(("x1", "x2", "x3"))
attempts = st.sampled_from((1, 1, 1, 2, 3))
ranks = st.integers(0, MAX_RANKS - 1)
sessions = st.sampled_from(("s1", "s2"))
senders = st.sampled_from(("p1", "p2", "p3", "p4"))
seats = st.builds(
    lambda engine, role, rank: ev.Seat(engine, role, rank if role == "worker" else 0),
    engine_ids,
    st.sampled_from(("scheduler", "worker")),
    ranks,
)
keys = st.builds(RequestKey, engine_ids, request_ids)
words = (engine_ids, ranks, external_ids, st.integers(0, 3), senders)
steps = st.sampled_from((0.0, 0.1, 1.0, 3.5, 5.0, 12.0, 31.0, 70.0, 200.0))
flags = st.booleans()

# Events that fit nothing in particular: lost their request, early, late, wrong.
strays: st.SearchStrategy[ev.Event] = st.one_of(
    st.builds(ev.SessionClosed, seats, sessions, st.just("gone")),
    st.builds(ev.Cancel, keys, st.one_of(st.none(), attempts)),
    st.builds(ev.Fulfilled, keys, attempts, st.just("virtual")),
    st.builds(ev.Deferred, keys, attempts),
    st.builds(ev.Started, keys, attempts, st.integers(0, 3), st.integers(0, 5)),
    st.builds(ev.StartFailed, keys, attempts, st.just("bad_blocks"), st.just("none such")),
    st.builds(ev.PrefillEnded, keys, attempts, flags, flags, st.just("HTTP"), flags),
    st.builds(ev.SenderDone, *words),
    st.builds(ev.SenderFailed, *words),
    st.builds(ev.LayersIn, *words, st.integers(-1, 8), st.integers(0, 9)),
    st.builds(ev.Acknowledged, seats, st.integers(0, 4), st.integers(-1, 6)),
    st.builds(ev.RankLost, engine_ids, ranks, st.just("gone")),
)


class AnyOrder(RuleBasedStateMachine):
    """The core and the naive model, fed with the same events."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = SideBySide(note)
        self.feed = self.pair.feed

    # Events, one rule each

    @initialize(data=st.data(), expect=st.booleans())
    def engines_come_up(self, data: st.DataObject, expect: bool) -> None:
        """Mostly a working engine; events find little to do otherwise."""
        self.pair.world = {e: data.draw(st.integers(1, MAX_RANKS), label=e) for e in ENGINES}
        self.pair.come_up("e1", "s1", expect)

    @rule(engine_id=engine_ids, session=sessions, expect=flags)
    def engine_comes_up(self, engine_id: str, session: str, expect: bool) -> None:
        """Anew, again, or after a loss."""
        self.pair.come_up(engine_id, session, expect)

    @rule(seat=seats, session=sessions, subscribe=flags, expect=flags, closes=flags)
    def session(
        self, seat: ev.Seat, session: str, subscribe: bool, expect: bool, closes: bool
    ) -> None:
        world = self.pair.world[seat.engine_id]
        if closes:
            self.feed(ev.SessionClosed(seat, session, "gone"))
        if seat.rank < world:
            self.feed(ev.SessionOpened(seat, session, world, subscribe, expect))

    @rule(data=st.data(), engine_id=engine_ids, rank=ranks, kind=st.integers(0, 4))
    def registration(self, data: st.DataObject, engine_id: str, rank: int, kind: int) -> None:
        """A rank registers, a registration is told twice or late, fenced, or lost."""
        if kind <= 1 and rank < self.pair.world[engine_id]:
            self.pair.register(engine_id, rank)
        elif kind == 2:
            self.feed(ev.RankRegistered(*data.draw(st.sampled_from(self.pair.ever))))
        elif kind == 3:
            self.feed(ev.RankFenced(*data.draw(st.sampled_from(self.pair.ever))))
        elif kind == 4:
            self.feed(ev.RankLost(engine_id, rank, "gone"))

    @precondition(lambda self: any(h.retired for h in self.pair.naive.houses.values()))
    @rule(data=st.data())
    def lost_rank_fenced(self, data: st.DataObject) -> None:
        lost = [(e, *slot) for e, house in self.pair.naive.houses.items() for slot in house.retired]
        self.feed(ev.RankFenced(*data.draw(st.sampled_from(lost))))

    @rule(
        key=keys,
        external=external_ids,
        attempt=attempts,
        block=st.integers(1, 2),
        virtual=flags,
        timeout=st.sampled_from((None, None, 0.5, 40.0, 1e6)),
    )
    def submit(
        self,
        key: RequestKey,
        external: str,
        attempt: int,
        block: int,
        virtual: bool,
        timeout: float | None,
    ) -> None:
        """Each submit is accepted, a repeat, or refused."""
        blocks = (array("q", [block]),)
        event = ev.Submit(key, external, attempt, blocks, 16, 0, virtual, {}, timeout)
        accepted = len(self.pair.naive.uses)
        effects = self.feed(event)
        refused = sum(isinstance(effect, ef.Refuse) for effect in effects)
        assert refused + len(self.pair.naive.uses) - accepted <= 1

    @rule(n=st.integers(1, 3), engine_id=engine_ids, attempt=attempts, starts=st.integers(0, 3))
    def submit_in_order(self, n: int, engine_id: str, attempt: int, starts: int) -> None:
        """Ids that belong together, most of them announced at once."""
        key = RequestKey(engine_id, f"r{n}")
        self.feed(ev.Submit(key, f"x{n}", attempt, (array("q", [1]),), 16, 0, False))
        if starts:
            self.feed(self.pair.started_event(key, attempt))

    def draw_live(self, data: st.DataObject, *, announced: bool = False) -> Use:
        live = [use for use in self.pair.naive.live() if use.announced or not announced]
        return data.draw(st.sampled_from(live), label="of")

    @precondition(lambda self: any(not u.announced for u in self.pair.naive.live()))
    @rule(data=st.data(), kind=st.integers(0, 5))
    def path_speaks(self, data: st.DataObject, kind: int) -> None:
        use = self.draw_live(data)
        about = use.key, use.attempt
        if kind == 0:
            self.feed(ev.Fulfilled(*about, "virtual"))
        elif kind == 1:
            self.feed(ev.Deferred(*about))
        elif kind == 2:
            self.feed(ev.StartFailed(*about, "bad_blocks", "none such"))
        else:
            self.feed(self.pair.started_event(*about))

    @precondition(lambda self: self.pair.naive.live())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.feed(ev.Cancel(self.draw_live(data).key))

    @precondition(lambda self: any(u.announced for u in self.pair.naive.live()))
    @rule(data=st.data(), ok=flags, began=flags, over=st.sampled_from((True, True, True, False)))
    def prefill_ended(self, data: st.DataObject, ok: bool, began: bool, over: bool) -> None:
        use = self.draw_live(data, announced=True)
        self.feed(ev.PrefillEnded(use.key, use.attempt, ok, began, "HTTP", over))

    @precondition(lambda self: any(u.announced for u in self.pair.naive.live()))
    @rule(data=st.data(), of=st.integers(1, 2), failing=flags, missing=st.integers(0, 3))
    def senders_speak(self, data: st.DataObject, of: int, failing: bool, missing: int) -> None:
        """The senders of a request speak, in some order; one may fail, some may be lost."""
        use = self.draw_live(data, announced=True)
        pairs = [(rank, f"p{n}") for rank in range(use.ranks) for n in range(1, of + 1)]
        pairs = data.draw(st.permutations(pairs))
        for number, (rank, sender) in enumerate(pairs[: max(1, len(pairs) - missing)]):
            kind = ev.SenderFailed if failing and number == 0 else ev.SenderDone
            self.feed(kind(use.key.engine_id, rank, use.external, of, sender))

    @precondition(lambda self: any(u.announced for u in self.pair.naive.uses))
    @rule(data=st.data(), rank=ranks, sender=senders, of=st.integers(1, 3), kind=st.integers(0, 2))
    def sender_speaks(
        self, data: st.DataObject, rank: int, sender: str, of: int, kind: int
    ) -> None:
        """One sender speaks, in time or late."""
        uses = [use for use in self.pair.naive.uses if use.announced][-4:]
        use = data.draw(st.sampled_from(uses), label="of")
        words = use.key.engine_id, rank, use.external, of, sender
        if kind == 2:
            self.feed(ev.LayersIn(*words, 0, 2))
        else:
            self.feed((ev.SenderDone, ev.SenderFailed)[kind](*words))

    @rule(event=strays, times=st.integers(1, 2))
    def stray(self, event: ev.Event, times: int) -> None:
        for _ in range(times):
            self.feed(event)

    @rule(engine_id=engine_ids, behind=st.integers(0, 2), data=st.data())
    def acknowledged(self, engine_id: str, behind: int, data: st.DataObject) -> None:
        house = self.pair.naive.houses.get(engine_id)
        if house is not None and house.log.readers:
            seat = data.draw(st.sampled_from(sorted(house.log.readers)))
            seq = len(house.log.outcomes) - behind
            self.feed(ev.Acknowledged(seat, house.log.number, seq))

    @rule(often=st.integers(0, 40))
    def shutdown(self, often: int) -> None:
        if often == 40:
            self.feed(ev.ShutdownBegan())
        elif often >= 38:
            self.feed(ev.ShutdownDue())

    @rule(step=steps, ticks=flags)
    def time_passes(self, step: float, ticks: bool) -> None:
        """Time may pass without a tick, as it does in a busy loop."""
        self.pair.now += step
        if ticks:
            self.feed(ev.Tick())
            late = [use for use in self.pair.naive.live() if use.deadline <= self.pair.now]
            assert not late, "a tick left work undone"

    @rule()
    def tick_when_due(self) -> None:
        due = self.pair.core.next_deadline()
        if due is not None:
            self.pair.now = max(self.pair.now, due)
        self.feed(ev.Tick())

    def teardown(self) -> None:
        self.pair.finish()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
