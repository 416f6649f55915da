"""The engine link: the ROUTER that engines' clients talk to, and the sessions behind it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import structlog
import zmq

from decoded import __version__
from decoded.core import events as ev
from decoded.core.engines import Engines
from decoded.core.request import RequestKey
from decoded.wire import link as wire

from .hello import check_hello
from .intake import Intake
from .refusals import RefusalSender
from .reports import ReportSender
from .router import RouterSocket, Unreachable
from .sessions import Session, Sessions

log = structlog.get_logger(__name__)

_HIGH_WATER_MARK = 1_000


@dataclass(frozen=True)
class LinkSettings:
    """A session not heard for `timeout_s` is given up; clients beat every `heartbeat_s`."""

    endpoint: str
    heartbeat_s: float = 1.0
    timeout_s: float = 10.0
    max_sessions: int = 1_024


class LinkHost(Protocol):
    """What the link needs of the daemon behind it."""

    @property
    def dispatch(self) -> Callable[..., None]:
        """Gives events to the core, in order, and carries out what it asks for."""

    def register_kv(self, session: Session, message: wire.RegisterKv) -> None:
        """Begin a registration; the answer goes out later through `EngineLink.answer`."""

    def unregister_kv(self, session: Session, message: wire.UnregisterKv) -> None:
        """End a registration; answered once nobody writes to it."""

    def generation(self, seat: ev.Seat, session: str) -> int | None:
        """The registration in force that this very client made."""

    def status(self, query: wire.StatusQuery) -> dict[str, Any]:
        """The answer to a status query."""


class EngineLink:
    """Owns the link's socket, its sessions and what was sent to them."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: LinkSettings,
        host: LinkHost,
        engines: Engines,
        counters: Counter[str],
        boot: str,
    ) -> None:
        """Binds the endpoint. Raises zmq.ZMQError."""
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._host = host
        self._engines = engines
        self._counters = counters
        self._boot = boot
        self.sessions = Sessions()
        self._router = RouterSocket(
            context,
            self._on_message,
            counters,
            self.flush,
            max_message_bytes=wire.MAX_FRAME_BYTES,
            high_water_mark=_HIGH_WATER_MARK,
        )
        self._reports = ReportSender(self._router, self.sessions, engines, boot)
        # To be told of each outcome: it is sent when the turn ends, or by `flush`.
        self.outcome_ready = self._reports.grown
        self._refusals = RefusalSender(self._router, counters)
        self._intake = Intake(self._router, host.dispatch, self.refuse, self.flush, counters)
        try:
            self.endpoint = self._router.bind(settings.endpoint)
        except zmq.ZMQError:
            self._router.close()
            raise
        self._stopped_until = 0.0
        self._sweep_at = self._loop.time() + settings.heartbeat_s
        self._sweeper = self._loop.call_at(self._sweep_at, self._sweep)
        self._handlers: dict[type, Callable[[Session, Any], None]] = {
            wire.RegisterKv: self._register_kv,
            wire.UnregisterKv: self._unregister_kv,
            wire.Submit: self._intake.submit,
            wire.Cancel: self._intake.cancel,
            wire.Acknowledge: self._acknowledge,
            wire.Heartbeat: self._heartbeat,
            wire.Bye: self._bye,
        }

    def close(self, linger_ms: int) -> None:
        """Stop listening; reports on their way have `linger_ms` to leave."""
        self._sweeper.cancel()
        self._router.close(linger_ms)

    # Towards clients

    def resend(self, seat: ev.Seat, first: int) -> None:
        """Send a seat everything from outcome `first` on."""
        self._reports.rewind(seat, first)

    def flush(self) -> None:
        """Send what has been reported and refused since the last time."""
        self._refusals.flush()
        self._reports.flush()

    def refuse(self, key: RequestKey, attempt: int, code: str, detail: str) -> None:
        """Tell the engine's scheduler, when the turn ends, that a submit was not accepted."""
        session = self.sessions.by_seat(ev.Seat(key.engine_id, "scheduler", 0))
        if session is not None:
            self._refusals.add(session, wire.Refusal(key.request_id, attempt, code, detail))

    def answer(self, seat: ev.Seat, message: wire.FromDaemon) -> None:
        """Send a late answer to whoever is at `seat` now, if anybody is."""
        session = self.sessions.by_seat(seat)
        if session is not None:
            self._send(session.identity, message)

    def _send(self, identity: bytes, message: wire.FromDaemon) -> None:
        self._refusals.flush()  # what was refused before this is told before this
        try:
            if not self._router.send(identity, wire.encode(message)):
                self._counters["link_unanswered"] += 1
        except Unreachable:
            session = self.sessions.by_identity(identity)
            if session is not None:
                session.reachable = False

    def _error(self, identity: bytes, error: wire.WireError) -> None:
        self._counters[f"link_error_{error.code}"] += 1
        answer = wire.Error(error.code, str(error), error.about, error.token)
        self._send(identity, answer)

    # From clients

    def _on_message(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            if len(frames) != 1:
                text = f"a message is one frame, this has {len(frames)}; use a DEALER socket"
                raise wire.WireError("malformed", text)
            message = wire.decode_from_client(frames[0])
            if isinstance(message, wire.StatusQuery):
                report = wire.StatusReport(message.token, self._host.status(message))
                self._send(identity, report)
                return
            if isinstance(message, wire.Hello):
                self._hello(identity, message)
                return
            session = self.sessions.by_identity(identity)
            if session is None:
                kind = str(message.__struct_config__.tag)
                text = "this connection has no session; say hello first"
                raise wire.WireError("hello_required", text, kind, getattr(message, "token", None))
            session.heard_at = self._loop.time()
            session.reachable = True
            self._handlers[type(message)](session, message)
        except wire.WireError as error:
            self._error(identity, error)
        except Exception:
            text = "the daemon failed at this message; see its log"
            self._error(identity, wire.WireError("internal", text))
            raise

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        check_hello(hello)
        self._check_world_size(hello)
        seat = ev.Seat(hello.engine_id, hello.role, hello.rank)
        here = self.sessions.by_identity(identity)
        if here is not None and here.seat != seat:
            raise wire.WireError("invalid", "a connection keeps its seat; open another", "hello")
        there = self.sessions.by_seat(seat)
        if there is not None and there.hello.session != hello.session:
            self._take_over(there)
        elif there is None and len(self.sessions) >= self._settings.max_sessions:
            text = f"{len(self.sessions)} sessions are open; raise link.max_sessions"
            raise wire.WireError("too_many_sessions", text, "hello")
        session = Session(identity, seat, hello, self._loop.time())
        self.sessions.add(session)
        self._counters["hellos"] += 1
        opened = ev.SessionOpened(
            seat, hello.session, hello.world_size, hello.subscribe, hello.expect_workers
        )
        self._host.dispatch(opened)
        engine = self._engines.by_id[hello.engine_id]
        self._reports.attach(session, engine)
        welcome = wire.Welcome(
            protocol=wire.PROTOCOL_VERSION,
            version=__version__,
            boot=self._boot,
            log=self._reports.log_name(engine.log.log),
            heartbeat_s=self._settings.heartbeat_s,
            timeout_s=self._settings.timeout_s,
            generation=self._host.generation(seat, hello.session),
        )
        self._send(identity, welcome)
        if here is None:
            log.info("session opened", engine_id=seat.engine_id, role=seat.role, rank=seat.rank)

    def _take_over(self, there: Session) -> None:
        """Another client wants a taken seat: it gets it only if the one there is gone."""
        self._probe(there)
        if there.reachable:
            seat = there.seat
            text = (
                f"{seat.role} {seat.rank} of engine {seat.engine_id} is connected already; "
                "stop it, or give this engine another id"
            )
            raise wire.WireError("seat_taken", text, "hello")
        self._close(there, "replaced by a new client")

    def _check_world_size(self, hello: wire.Hello) -> None:
        """An engine changes its world size only when no client of its last life is there."""
        engine = self._engines.get(hello.engine_id)
        if engine is None or not engine.sessions or engine.world_size == hello.world_size:
            return
        sessions = self.sessions.of_engine(hello.engine_id)
        for session in sessions:
            self._probe(session)
        if any(session.reachable for session in sessions):
            text = (
                f"engine {hello.engine_id} runs with world_size {engine.world_size}, "
                f"not {hello.world_size}"
            )
            raise wire.WireError("world_size_mismatch", text, "hello")
        for session in sessions:
            self._close(session, "its engine came back with another world size")

    def _acknowledge(self, session: Session, message: wire.Acknowledge) -> None:
        if message.log == self._reports.log_name(session.log):
            self._host.dispatch(ev.Acknowledged(session.seat, session.log, message.seq))
            self._reports.grown(session.seat.engine_id)
        else:
            self._counters["stray_acknowledge"] += 1

    def _heartbeat(self, session: Session, message: wire.Heartbeat) -> None:
        self._send(session.identity, message)
        self._reports.grown(session.seat.engine_id)

    def _register_kv(self, session: Session, message: wire.RegisterKv) -> None:
        if session.seat.role != "worker":
            text = "only a worker registers KV"
            raise wire.WireError("wrong_role", text, "register_kv", message.token)
        self._host.register_kv(session, message)

    def _unregister_kv(self, session: Session, message: wire.UnregisterKv) -> None:
        self._host.unregister_kv(session, message)

    def _bye(self, session: Session, message: wire.Bye) -> None:
        self._close(session, "said bye")

    # Liveness

    def _sweep(self) -> None:
        """Give up sessions that were silent for too long, and find out who is gone."""
        now, settings = self._loop.time(), self._settings
        if now - self._sweep_at > settings.heartbeat_s:
            # This process was stopped, or its loop: what came meanwhile is yet to be read.
            self._stopped_until = now
        self._sweep_at = now + settings.heartbeat_s
        self._sweeper = self._loop.call_at(self._sweep_at, self._sweep)
        for session in self.sessions if not self._router.paused else ():
            # Nobody is silent while nobody is listened to.
            heard_at = max(session.heard_at, self._intake.listening_since, self._stopped_until)
            silent = now - heard_at
            if silent > settings.timeout_s:
                self._close(session, f"not heard for {silent:.1f} s")
            elif silent > 2 * settings.heartbeat_s:
                self._probe(session)
        self.flush()

    def _probe(self, session: Session) -> None:
        """A ROUTER refuses to send to an identity whose connection is closed."""
        self._send(session.identity, wire.Heartbeat())

    def _close(self, session: Session, why: str) -> None:
        self.sessions.remove(session)
        seat = session.seat
        log.info(
            "session closed", engine_id=seat.engine_id, role=seat.role, rank=seat.rank, why=why
        )
        self._host.dispatch(ev.SessionClosed(seat, session.hello.session, why))
