"""The daemon's parts, put together."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import ssl
from contextlib import AsyncExitStack
from typing import Any

import structlog
import zmq

from decoded import __version__
from decoded.config import Config, core_settings
from decoded.config.schema import FixedDelay, TlsConfig
from decoded.core import Core
from decoded.core import events as ev
from decoded.edges.link import EngineLink, LinkSettings
from decoded.edges.metaserver import MetaserverClient, MetaserverSettings
from decoded.edges.ports import owner_of_port
from decoded.edges.sessions import Session
from decoded.kv.layout import pool_layout
from decoded.kv.regions import SHARED_PREFIX, unlink_stale
from decoded.receiver import ReceiverPath
from decoded.receiver.opening import Opener
from decoded.receiver.path import Destination
from decoded.receiver.pool import Pool
from decoded.receiver.ports import MAX_RANKS, SideChannels
from decoded.receiver.rank import TransferSettings
from decoded.receiver.registrations import Registrations
from decoded.virtual import VirtualDelay, VirtualPath
from decoded.wire import link as wire

from .dispatcher import Dispatcher
from .status import engines_report, requests_report, states_report

log = structlog.get_logger(__name__)

_LINGER_MS = 1_000
# One per side channel; libzmq allows 1,023 unless it is told.
_MAX_SOCKETS = 4 * MAX_RANKS
# Clients and producers, side channels, Mooncake, shared memory.
_OTHER_DESCRIPTORS = 4_096


class Daemon:
    """Owns every part. `boot` is random per start: it makes generations and logs unique."""

    def __init__(self, config: Config, endpoint: str) -> None:
        self.boot = secrets.token_hex(4)
        self._config = config
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        self._core = Core(core_settings(config, os.environ))
        self._dispatcher = Dispatcher(self._core)
        # Every event comes this way; a method in between would be paid for each time.
        self.dispatch = self._dispatcher.dispatch
        self._pool = Pool()
        # Closed last to first, each even if another fails at it.
        self._open = AsyncExitStack()
        self._open.callback(self._context.term)

    async def start(self) -> None:
        """Allocate, bind, listen. Raises RegionError, PortError, zmq.ZMQError or OSError."""
        config, core, context = self._config, self._core, self._context
        host = config.side_channel.host
        counters = core.counters
        _remove_stale_memory()
        # At the very end, too: of an engine that died after its memory was let go.
        self._open.callback(_remove_stale_memory)
        if config.kv.pool is not None:
            groups, layers = config.kv.pool.groups, config.kv.pool.expanded()
            names = [f"{SHARED_PREFIX}{self.boot}-{rank}" for rank in range(config.kv.pool.ranks)]
            self._pool = await Pool.create(
                [pool_layout(groups, layers, name) for name in names], config.kv.pool.npus
            )
            self._open.push_async_callback(self._pool.close)
        self._channels = SideChannels(
            context,
            config.side_channel.bind_host,
            config.side_channel.base_port,
            config.side_channel.ranks,
            self.dispatch,
            counters,
        )
        self._open.callback(self._channels.close)
        self._metaserver = MetaserverClient(
            MetaserverSettings(
                config.metaserver.connect_timeout_s,
                config.metaserver.total_timeout_s,
                config.metaserver.retries,
                config.metaserver.backoff_s,
                max_connections(),
            ),
            tls_context(config.metaserver.tls),
        )
        self._open.push_async_callback(self._metaserver.close)
        self._link = self._bind_link(context)
        self._endpoint = self._link.endpoint
        self._open.callback(self._link.close, _LINGER_MS)
        transfer = TransferSettings(host, config.transfer.protocol, config.transfer.device)
        self._receiver = ReceiverPath(
            core.engines, self._metaserver, self._destination, self.dispatch, counters
        )
        self._registrations = Registrations(
            host,
            Opener(transfer, self._pool, core.settings.drain_s),
            self._channels,
            core.engines,
            self.dispatch,
            self._link,
            self._receiver.engine_ready,
        )
        self._open.push_async_callback(self._registrations.close)
        self._open.push_async_callback(self._receiver.close)
        self._open.callback(self._dispatcher.close)
        virtual = VirtualPath(self.dispatch, virtual_delay(config))
        self._dispatcher.wire_up(self._link, self._registrations, self._receiver, virtual)

    def _bind_link(self, context: zmq.Context[zmq.Socket[bytes]]) -> EngineLink:
        settings = self._config.link
        try:
            return EngineLink(
                context,
                LinkSettings(
                    self._endpoint, settings.heartbeat_s, settings.timeout_s, settings.max_sessions
                ),
                self,
                self._core.engines,
                self._core.counters,
                self.boot,
            )
        except zmq.ZMQError as error:
            port = self._endpoint.rpartition(":")[2]
            whose = owner_of_port(int(port)) if port.isdigit() else None
            held = f", which {whose} holds" if whose else ""
            text = f"cannot bind {self._endpoint}{held}: {error.strerror}; change link.endpoint"
            raise OSError(error.errno, text) from None

    @property
    def endpoint(self) -> str:
        """Where the link listens: a port, even where the configuration says `*`."""
        return self._endpoint

    @property
    def in_flight(self) -> int:
        return len(self._core.ledger.live)

    async def drain(self) -> None:
        """Take no new requests; let those in flight end, by themselves or by force.

        What is left after deadlines.shutdown_s expires. It is reported only where writers are
        shut out: an engine that runs its own transfer engine keeps its blocks until it has
        submitted to the next daemon.
        """
        self.dispatch(ev.ShutdownBegan())
        if self.in_flight:
            self._dispatcher.idle.clear()
            try:
                await asyncio.wait_for(
                    self._dispatcher.idle.wait(), self._config.deadlines.shutdown_s
                )
            except asyncio.TimeoutError:
                log.warning("requests are left at shutdown", in_flight=self.in_flight)
        self.dispatch(ev.ShutdownDue())
        await self._registrations.fence_all()
        self._link.flush()

    async def close(self) -> None:
        """Let go of sockets, memory and threads. Safe after a start that failed half-way."""
        await self._open.aclose()

    # LinkHost

    def register_kv(self, session: Session, message: wire.RegisterKv) -> None:
        self._registrations.register(session, message)

    def unregister_kv(self, session: Session, message: wire.UnregisterKv) -> None:
        self._registrations.unregister(session, message)

    def generation(self, seat: ev.Seat, session: str) -> int | None:
        registration = self._registrations.current(seat.engine_id, seat.rank)
        mine = registration is not None and (registration.seat, registration.session) == (
            seat,
            session,
        )
        return registration.generation if registration is not None and mine else None

    def status(self, query: wire.StatusQuery) -> dict[str, Any]:
        core, now = self._core, self._loop.time()
        return {
            "version": __version__,
            "protocol": wire.PROTOCOL_VERSION,
            "boot": self.boot,
            "pid": os.getpid(),
            "endpoint": self._endpoint,
            "uptime_s": now - self._started_at,
            "shutting_down": core.shutting_down,
            "states": states_report(core),
            "sessions": len(self._link.sessions),
            "metaserver_calls": self._receiver.calls,
            "side_channel_ports": self._channels.bound,
            "engines": engines_report(core, self._registrations),
            "requests": requests_report(core, self._registrations, query, now),
            "counters": dict(core.counters),
        }

    def _destination(self, engine_id: str) -> Destination | None:
        engine = self._core.engines.get(engine_id)
        registration = self._registrations.current(engine_id, 0)
        if engine is None or not engine.ready or registration is None:
            return None
        sessions = self._link.sessions.of_engine(engine_id)
        # The scheduler speaks for the engine; its ranks all say the same.
        hello = min(sessions, key=lambda session: session.seat.role).hello
        return Destination(
            registration.opened.layout,
            self._config.side_channel.host,
            self._channels.of(engine_id)[0].port,
            f"{engine_id}.{self.boot}.{engine.generation}",
            hello.tp_size or engine.world_size // hello.pcp_size,
            hello.pcp_size,
            hello.dcp_size,
        )


def max_connections() -> int:
    """How many metaserver calls may be open, so that descriptors are left for everything else."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if descriptors == resource.RLIM_INFINITY:
        return 0
    return max(descriptors - _OTHER_DESCRIPTORS, descriptors // 2)


def virtual_delay(config: Config) -> VirtualDelay | None:
    """The configured delay of virtual requests."""
    delay = config.virtual.delay
    if delay is None:
        return None
    if isinstance(delay, FixedDelay):
        return VirtualDelay(delay.fixed_s)
    return VirtualDelay(delay.latency_s, delay.bytes_per_token, delay.bandwidth_bytes_per_s)


def tls_context(tls: TlsConfig | None) -> ssl.SSLContext | None:
    """The TLS settings of metaserver calls. Raises OSError if a file cannot be read."""
    if tls is None:
        return None
    context = ssl.create_default_context(cafile=tls.ca_file)
    if tls.cert_file is not None:
        password = tls.key_password.get_secret_value() if tls.key_password else None
        context.load_cert_chain(tls.cert_file, tls.key_file, password)
    return context


def _remove_stale_memory() -> None:
    """Ours and clients' alike: what bears the prefix and has no living owner is left over."""
    for name in unlink_stale(SHARED_PREFIX):
        log.info("removed shared memory that a dead process left", name=name)
