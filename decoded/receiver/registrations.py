"""Registrations of KV memory: one per rank of an engine, each with a fresh generation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from decoded.core.effects import Fence, Release
from decoded.core.engines import Engines
from decoded.core.events import Event, RankFenced, RankLost, RankRegistered, Seat
from decoded.edges.sessions import Session
from decoded.edges.throttle import Throttle
from decoded.kv.layout import layer_metadata
from decoded.wire import link, side_channel
from decoded.wire.layout import PoolMemory

from .opening import Opened, Opener, RegistrationError
from .pool import Pool
from .ports import PortError, SideChannels
from .rank import RankThread, RankThreads, Slot

log = structlog.get_logger(__name__)


class Answers(Protocol):
    """Where late answers to clients go: the engine link."""

    def answer(self, seat: Seat, message: link.FromDaemon) -> None: ...


@dataclass
class Registration:
    """One rank's registered memory, made by client session `session`.

    `thread`: the rank's, taken until the memory is closed.
    """

    seat: Seat
    session: str
    generation: int
    opened: Opened
    thread: RankThread

    @property
    def slot(self) -> Slot:
        return self.seat.engine_id, self.seat.rank


@dataclass
class Farewell:
    """An unregister_kv, to be answered once all of `generations` are released."""

    seat: Seat
    token: int
    generations: set[int]


class Registrations:
    """Opens, fences and releases registrations, and publishes them on the side channels.

    `host` is what producers connect to; `on_ready(engine_id)` is called whenever every
    rank of an engine is registered.
    """

    def __init__(
        self,
        host: str,
        opener: Opener,
        channels: SideChannels,
        engines: Engines,
        dispatch: Callable[[Event], None],
        answers: Answers,
        on_ready: Callable[[str], None],
    ) -> None:
        self._host = host
        self._opener = opener
        self._channels = channels
        self._engines = engines
        self._dispatch = dispatch
        self._answers = answers
        self._on_ready = on_ready
        self._last_generation = 0
        self._current: dict[Slot, Registration] = {}
        self._held: dict[int, Registration] = {}
        self._farewells: list[Farewell] = []
        self._wishes: dict[Slot, link.RegisterKv] = {}
        self._opening: Counter[str] = Counter()
        self._threads = RankThreads()
        self._tasks: set[asyncio.Task[None]] = set()
        self._complaints = Throttle()
        self._closing = False

    def current(self, engine_id: str, rank: int) -> Registration | None:
        """The registration in force for a rank."""
        return self._current.get((engine_id, rank))

    def all_current(self) -> list[Registration]:
        """Every registration in force."""
        return list(self._current.values())

    # What clients ask for

    def register(self, session: Session, message: link.RegisterKv) -> None:
        """Begin a registration; the client hears of its end. A rank's last wish counts."""
        seat = session.seat
        if self._closing:
            self._refuse(seat, message.token, "shutting_down", "the daemon is stopping")
            return
        slot = seat.engine_id, seat.rank
        self._wishes[slot] = message
        before = self._current.get(slot)
        if isinstance(message.memory, PoolMemory) and before and before.opened.pool_rank:
            # The rank's share must come back before it can be lent again.
            self._dispatch(RankLost(*slot, "registered again"))
        self._spawn(self._register(seat, session.hello, message))

    def unregister(self, session: Session, message: link.UnregisterKv) -> None:
        """End a registration; answered once nobody writes to the memory any more."""
        seat = session.seat
        slot = seat.engine_id, seat.rank
        self._wishes.pop(slot, None)
        # Earlier registrations too: a repeated message must not be answered while one drains.
        held = {generation for generation, each in self._held.items() if each.slot == slot}
        if not held:
            self._answers.answer(seat, link.KvUnregistered(message.token))
            return
        self._farewells.append(Farewell(seat, message.token, held))
        if slot in self._current:
            self._dispatch(RankLost(*slot, "unregistered"))

    async def _register(self, seat: Seat, hello: link.Hello, message: link.RegisterKv) -> None:
        slot = seat.engine_id, seat.rank
        thread = self._threads.take(slot)
        self._opening[seat.engine_id] += 1
        try:
            self._channels.lend(seat.engine_id, hello.world_size, message.side_channel_port)
            opened = await self._opener.open(seat, message.memory, thread)
        except (PortError, RegistrationError) as error:
            code = error.code if isinstance(error, RegistrationError) else "port_taken"
            self._refuse(seat, message.token, code, str(error))
            self._threads.give_back(slot)
        except Exception:
            log.exception("registration failed", engine_id=seat.engine_id, rank=seat.rank)
            text = "the daemon failed to open this memory; see its log"
            self._refuse(seat, message.token, "internal", text)
            self._threads.give_back(slot)
        else:
            self._last_generation += 1
            generation = self._last_generation
            registration = Registration(seat, hello.session, generation, opened, thread)
            refusal = self._why_not(registration, message)
            if refusal is None:
                self._publish(registration, message.token)
            else:
                self._refuse(seat, message.token, *refusal)
                await self._close(registration)
        finally:
            self._opening[seat.engine_id] -= 1
            if self._wishes.get(slot) is message:
                del self._wishes[slot]
            self._tidy(seat.engine_id)

    def _refuse(self, seat: Seat, token: int, code: str, text: str) -> None:
        if self._complaints.passes():
            where = {"engine_id": seat.engine_id, "rank": seat.rank}
            log.warning("registration failed", code=code, error=text, **where)
        self._answers.answer(seat, link.Error(code, text, "register_kv", token))

    def _why_not(
        self, registration: Registration, message: link.RegisterKv
    ) -> tuple[str, str] | None:
        """Why memory that could be opened is not to be registered after all."""
        seat, groups = registration.seat, registration.opened.layout.groups
        engine = self._engines.get(seat.engine_id)
        if engine is None or engine.sessions.get(seat) != registration.session:
            return "abandoned", "its client has left"
        if self._wishes.get(registration.slot) is not message:
            return "abandoned", "the client has unregistered, or registers something else"
        for other in self._current.values():
            if other.seat.engine_id != seat.engine_id or other.seat.rank == seat.rank:
                continue
            if other.opened.layout.groups != groups:
                text = (
                    f"the KV groups of rank {seat.rank} are not those of rank {other.seat.rank}; "
                    "one request has the same blocks on every rank"
                )
                return "bad_layout", text
        return None

    def _publish(self, registration: Registration, token: int) -> None:
        engine_id, rank = registration.slot
        opened = registration.opened
        metadata = side_channel.Metadata(
            opened.te_rpc_port,
            layer_metadata(opened.layout, opened.region_addrs),
            progress=True,
        )
        encoded = side_channel.encode_metadata(metadata)
        self._held[registration.generation] = registration
        # The core first: an earlier registration of this rank ends before this one shows.
        self._dispatch(RankRegistered(engine_id, rank, registration.generation))
        if registration.generation not in self._held:
            self._refuse(registration.seat, token, "abandoned", "its client has left")
            return
        self._current[registration.slot] = registration
        channels = self._channels.of(engine_id)
        channels[rank].metadata = encoded
        log.info(
            "registered",
            engine_id=engine_id,
            rank=rank,
            generation=registration.generation,
            source=opened.source,
            port=channels[rank].port,
        )
        answer = link.KvRegistered(
            token, registration.generation, self._host, channels[0].port, opened.layout
        )
        self._answers.answer(registration.seat, answer)
        if self._engines.by_id[engine_id].ready:
            self._on_ready(engine_id)

    # What the core asks for

    def fence(self, effect: Fence) -> None:
        """A registration is over: hide it, and shut its writers out where that is possible."""
        registration = self._held.get(effect.generation)
        if registration is None:
            return
        if self._current.get(registration.slot) is registration:
            del self._current[registration.slot]
            self._channels.of(effect.engine_id)[effect.rank].metadata = None
        if registration.opened.pool_rank is not None:
            registration.opened.pool_rank.retiring = True
        if registration.opened.memory is not None:
            self._spawn(self._fence(registration))

    async def _fence(self, registration: Registration) -> None:
        memory = registration.opened.memory
        if memory is not None and registration.generation in self._held:
            await registration.thread.run(memory.fence)
            self._dispatch(RankFenced(*registration.slot, registration.generation))

    def release(self, effect: Release) -> None:
        """No request can be written through this registration any more: let go of its memory."""
        registration = self._held.pop(effect.generation, None)
        if registration is not None:
            self._spawn(self._release(registration))

    async def _release(self, registration: Registration) -> None:
        await self._close(registration)
        for farewell in list(self._farewells):
            farewell.generations.discard(registration.generation)
            if not farewell.generations:
                self._farewells.remove(farewell)
                self._answers.answer(farewell.seat, link.KvUnregistered(farewell.token))
        engine_id, rank = registration.slot
        log.info("released", engine_id=engine_id, rank=rank, generation=registration.generation)

    async def _close(self, registration: Registration) -> None:
        opened = registration.opened
        try:
            if opened.memory is not None:
                await registration.thread.run(opened.memory.close)
            if opened.pool_rank is not None:
                Pool.give_back(opened.pool_rank)
        finally:
            self._threads.give_back(registration.slot)
            self._tidy(registration.seat.engine_id)

    def _tidy(self, engine_id: str) -> None:
        """Give back the ports that no registration needs any more."""
        if not self._opening[engine_id]:
            del self._opening[engine_id]
            if not any(each.seat.engine_id == engine_id for each in self._held.values()):
                self._channels.take_back(engine_id)

    # Shutdown

    async def fence_all(self) -> None:
        """Shut out every writer that this process can shut out, and tell the core."""
        for registration in list(self._held.values()):
            await self._fence(registration)

    async def close(self) -> None:
        """Let go of everything. What is being opened is closed once it is open."""
        self._closing = True
        self._wishes.clear()
        while self._held or self._tasks:
            while self._held:
                _, registration = self._held.popitem()
                await self._close(registration)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("registration task failed", exc_info=error)
