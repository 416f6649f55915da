"""The session against a model of the daemon: losses, repeats and restarts in any order.

Whatever happens, each submission ends with exactly one outcome, at the scheduler and
at a worker that only listens.
"""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from decoded.client.errors import DuplicateSubmission
from decoded.client.identity import make_hello
from decoded.client.session import Phase, Session
from decoded.client.submissions import prepare

from .daemon_model import MEMORY, DaemonModel, submission

SEATS = ("scheduler", "worker")
AMOUNT = st.sampled_from((0, 1, 9, 9))


class Wire:
    """A session, and the frames on their way between it and the daemon."""

    def __init__(self, seat: str, daemon: DaemonModel) -> None:
        role = "scheduler" if seat == "scheduler" else "worker"
        hello = make_hello("engine", role, 0, 1, True, False, None, 1, 1, "test")  # type: ignore[arg-type]
        self.seat, self.daemon = seat, daemon
        self.session = Session(hello, jitter=lambda: 0.5)
        self.up: deque[bytes] = deque()
        self.down: deque[bytes] = deque()
        self.got: Counter[str] = Counter()

    def step(self, now: float) -> None:
        """What a shell does whenever it wakes."""
        if self.session.wants_connection(now):
            self.cut()
            self.session.connected(now)
        self.session.tick(now)
        for outcome in self.session.take_outcomes():
            self.got[outcome.external_id] += 1
        self.session.take_answers()
        self.up.extend(self.session.take_frames())

    def cut(self) -> None:
        """A new socket: nothing of the old one arrives any more."""
        self.up.clear()
        self.down.clear()
        self.daemon.disconnect(self.seat)

    def carry(self, up: int, down: int, now: float) -> None:
        """Deliver so many frames each way."""
        for _ in range(min(up, len(self.up))):
            self.down.extend(self.daemon.take(self.seat, self.up.popleft()))
        self.down.extend(self.daemon.reports(self.seat, limit=2))
        for _ in range(min(down, len(self.down))):
            self.session.receive(self.down.popleft(), now)
        self.step(now)


class AnyOrder(RuleBasedStateMachine):
    """`asked`: by external id, which is new for each submission; request ids come back."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.daemon = DaemonModel()
        self.wires = {seat: Wire(seat, self.daemon) for seat in SEATS}
        self.asked: dict[str, tuple[str, int]] = {}
        self.cancelled: set[str] = set()

    @initialize()
    def begin(self) -> None:
        self.wires["worker"].session.register(MEMORY)
        for one in self.wires.values():
            one.step(self.now)

    @property
    def scheduler(self) -> Session:
        return self.wires["scheduler"].session

    @rule(number=st.integers(0, 1), attempt=st.sampled_from((1, 1, 1, 2)))
    def submit(self, number: int, attempt: int) -> None:
        key, external_id = (f"r{number}", attempt), f"x{len(self.asked)}"
        got = self.wires["scheduler"].got
        again = any(known == key and not got[one] for one, known in self.asked.items())
        try:
            self.scheduler.submit(prepare([submission(*key, external_id)]))
        except DuplicateSubmission:
            assert again
        else:
            assert not again
            self.asked[external_id] = key
        self.wires["scheduler"].step(self.now)

    @rule(number=st.integers(0, 1), attempt=st.sampled_from((None, 1, 2)))
    def cancel(self, number: int, attempt: int | None) -> None:
        self.scheduler.cancel(f"r{number}", attempt)
        for external_id, key in self.asked.items():
            if key[0] == f"r{number}" and attempt in (None, key[1]):
                self.cancelled.add(external_id)
        self.wires["scheduler"].step(self.now)

    @rule(seat=st.sampled_from(SEATS), up=AMOUNT, down=AMOUNT)
    def carry(self, seat: str, up: int, down: int) -> None:
        self.wires[seat].carry(up, down, self.now)

    @precondition(lambda self: self.daemon.live)
    @rule(which=st.integers(0, 1))
    def finish(self, which: int) -> None:
        live = sorted(self.daemon.live)
        self.daemon.finish(live[which % len(live)])

    @rule(count=st.integers(1, 3))
    def refuse(self, count: int) -> None:
        self.daemon.refuse_next = count

    @rule(seat=st.sampled_from(SEATS))
    def cut(self, seat: str) -> None:
        """The connection breaks and comes back by itself: what was on it is lost."""
        self.wires[seat].cut()

    @rule(seat=st.sampled_from(SEATS))
    def repeat(self, seat: str) -> None:
        """The daemon sends everything again that is not acknowledged."""
        log = self.daemon.log
        log.sent[seat] = log.acknowledged.get(seat, 0)

    @rule()
    def restart(self) -> None:
        self.daemon.restart()
        for one in self.wires.values():
            one.down.clear()

    @rule(seconds=st.sampled_from((0.01, 0.5, 2.0, 12.0)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for one in self.wires.values():
            one.step(self.now)

    @invariant()
    def never_too_often(self) -> None:
        for one in self.wires.values():
            assert one.got.keys() <= self.asked.keys()
            assert all(count == 1 for count in one.got.values())
        assert self.scheduler.fatal is None

    def teardown(self) -> None:
        """With a daemon that stays, everything comes to its end."""
        for _ in range(200):
            self.now += 0.3
            for one in self.wires.values():
                one.step(self.now)
                one.carry(100, 100, self.now)
            for request_id, live in list(self.daemon.live.items()):
                if live.external_id not in self.cancelled:
                    self.daemon.finish(request_id)
        assert self.wires["scheduler"].got.keys() == self.asked.keys()
        assert not self.scheduler.pending
        worker = self.wires["worker"]
        assert all(one.session.phase is Phase.UP for one in self.wires.values())
        registration = worker.session.registration
        assert registration is not None
        assert registration.generation == self.daemon.generations["worker"]
        log = self.daemon.log
        for seat in SEATS:
            assert log.acknowledged.get(seat, 0) == len(log.outcomes)


def test_long_walks() -> None:
    """The same at random, far longer than hypothesis walks, from fixed seeds."""
    for seed in range(60):
        rng = Random(seed)
        world = AnyOrder()
        world.begin()
        for _ in range(400):
            seat, up, down = rng.choice(SEATS), rng.choice((0, 1, 9)), rng.choice((0, 1, 9))
            draw = rng.random()
            if draw < 0.45:
                world.carry(seat, up, down)
            elif draw < 0.65:
                world.submit(rng.randrange(2), rng.choice((1, 1, 1, 2)))
            elif draw < 0.85:
                if world.daemon.live:
                    world.finish(rng.randrange(2))
            elif draw < 0.90:
                world.pass_time(rng.choice((0.01, 0.01, 0.5, 12.0)))
            elif draw < 0.92:
                world.cancel(rng.randrange(2), rng.choice((None, 1, 2)))
            else:
                rng.choice((world.cut, world.repeat))(seat)
                if rng.random() < 0.2:
                    world.refuse(1)
                elif rng.random() < 0.2:
                    world.restart()
            world.never_too_often()
        world.teardown()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
