"""Registrations of KV memory: one per rank of an engine, each with a fresh generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from decoded.core.effects import Fence, Release
from decoded.core.engines import Engines
from decoded.core.events import Event, RankFenced, RankLost, RankRegistered, Seat
from decoded.edges.sessions import Session
from decoded.kv.layout import layer_metadata
from decoded.wire import link, side_channel

from .opening import Opened, Opener, RegistrationError
from .pool import Pool
from .ports import PortError, SideChannels
from .rank import RankThread

log = structlog.get_logger(__name__)

Slot = tuple[str, int]


class Answers(Protocol):
    """Where late answers to clients go: the engine link."""

    def answer(self, seat: Seat, message: link.FromDaemon) -> None: ...


@dataclass
class Registration:
    """One rank's registered memory, made by client session `session`."""

    seat: Seat
    session: str
    generation: int
    opened: Opened
    unregister_tokens: list[int] = field(default_factory=list)

    @property
    def slot(self) -> Slot:
        return self.seat.engine_id, self.seat.rank


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
        self._threads: dict[Slot, RankThread] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def current(self, engine_id: str, rank: int) -> Registration | None:
        """The registration in force for a rank."""
        return self._current.get((engine_id, rank))

    def all_current(self) -> list[Registration]:
        """Every registration in force."""
        return list(self._current.values())

    # What clients ask for

    def register(self, session: Session, message: link.RegisterKv) -> None:
        """Begin a registration; the client hears of its end."""
        self._spawn(self._register(session.seat, session.hello, message))

    def unregister(self, session: Session, message: link.UnregisterKv) -> None:
        """End a registration; answered once nobody writes to the memory any more."""
        registration = self._current.get((session.seat.engine_id, session.seat.rank))
        if registration is None:
            self._answers.answer(session.seat, link.KvUnregistered(message.token))
            return
        registration.unregister_tokens.append(message.token)
        self._dispatch(RankLost(*registration.slot, "unregistered"))

    async def _register(self, seat: Seat, hello: link.Hello, message: link.RegisterKv) -> None:
        where = {"engine_id": seat.engine_id, "rank": seat.rank}
        try:
            self._channels.lend(seat.engine_id, hello.world_size, message.side_channel_port)
            opened = await self._opener.open(seat, message.memory, self._thread(seat))
        except (PortError, RegistrationError) as error:
            code = error.code if isinstance(error, RegistrationError) else "port_taken"
            log.warning("registration failed", code=code, error=str(error), **where)
            answer = link.Error(code, str(error), "register_kv", message.token)
            self._answers.answer(seat, answer)
            self._tidy(seat)
            return
        self._last_generation += 1
        registration = Registration(seat, hello.session, self._last_generation, opened)
        engine = self._engines.get(seat.engine_id)
        if engine is None or engine.sessions.get(seat) != hello.session:
            log.info("registration abandoned", why="its client has left", **where)
            await self._close(registration)
            return
        self._publish(registration)
        self._answers.answer(
            seat,
            link.KvRegistered(
                message.token,
                registration.generation,
                self._host,
                self._channels.of(seat.engine_id)[0].port,
                opened.layout,
            ),
        )
        if engine.ready:
            self._on_ready(seat.engine_id)

    def _publish(self, registration: Registration) -> None:
        engine_id, rank = registration.slot
        opened = registration.opened
        self._held[registration.generation] = registration
        # The core first: an earlier registration of this rank ends before this one shows.
        self._dispatch(RankRegistered(engine_id, rank, registration.generation))
        self._current[registration.slot] = registration
        channel = self._channels.of(engine_id)[rank]
        channel.metadata = side_channel.encode_metadata(
            side_channel.Metadata(
                opened.te_rpc_port,
                layer_metadata(opened.layout, opened.region_addrs),
                progress=True,
            )
        )
        log.info(
            "registered",
            engine_id=engine_id,
            rank=rank,
            generation=registration.generation,
            source=opened.source,
            port=channel.port,
        )

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
        if memory is not None:
            await self._thread(registration.seat).run(memory.fence)
            self._dispatch(RankFenced(*registration.slot, registration.generation))

    def release(self, effect: Release) -> None:
        """No request can be written through this registration any more: let go of its memory."""
        registration = self._held.pop(effect.generation, None)
        if registration is not None:
            self._spawn(self._release(registration))

    async def _release(self, registration: Registration) -> None:
        await self._close(registration)
        for token in registration.unregister_tokens:
            self._answers.answer(registration.seat, link.KvUnregistered(token))
        engine_id, rank = registration.slot
        log.info("released", engine_id=engine_id, rank=rank, generation=registration.generation)

    async def _close(self, registration: Registration) -> None:
        opened = registration.opened
        if opened.memory is not None:
            await self._thread(registration.seat).run(opened.memory.close)
        if opened.pool_rank is not None:
            Pool.give_back(opened.pool_rank)
        self._tidy(registration.seat)

    def _tidy(self, seat: Seat) -> None:
        """Give back the thread and the ports that no registration needs any more."""
        slot = seat.engine_id, seat.rank
        held = list(self._held.values())
        if slot in self._threads and not any(r.slot == slot for r in held):
            self._threads.pop(slot).close()
        if not any(r.seat.engine_id == seat.engine_id for r in held):
            self._channels.take_back(seat.engine_id)

    # Shutdown

    async def fence_all(self) -> None:
        """Shut out every writer that this process can shut out, and tell the core."""
        for registration in list(self._held.values()):
            await self._fence(registration)

    async def close(self) -> None:
        """Let go of everything."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for registration in list(self._held.values()):
            await self._close(registration)
        self._held.clear()
        for thread in self._threads.values():
            thread.close()

    def _thread(self, seat: Seat) -> RankThread:
        slot = seat.engine_id, seat.rank
        thread = self._threads.get(slot)
        if thread is None:
            thread = self._threads[slot] = RankThread(f"rank-{seat.engine_id}-{seat.rank}")
        return thread

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("registration task failed", exc_info=error)
