"""Side channel ports: the ranks of one engine get neighbouring ones.

Producers compute `remote_port + world_rank` themselves, so a gap is not possible.
"""

from __future__ import annotations

import errno
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from decoded.core.events import Event
from decoded.edges.ports import owner_of_port
from decoded.edges.side_channel import SideChannel

# Free ranges are looked for here: below the ephemeral ports of Linux (32768) and above
# Mooncake's own (MC_MIN_RPC_PORT..MC_MAX_RPC_PORT, 15000..17000 unless set).
_FREE_FROM, _FREE_TO, _TRIES = 17_001, 32_767, 64

# Side channels of one engine; what the configuration allows to be held, too.
MAX_RANKS = 4_096


class PortError(Exception):
    """Ports that cannot be had. The text names the port and what to change."""


class _CannotBind(Exception):
    def __init__(self, host: str, port: int, error: zmq.ZMQError) -> None:
        super().__init__(f"side channel port {port} on {host} cannot be bound: {error.strerror}")
        self.port = port
        self.errno = error.errno


class SideChannels:
    """Binds side channels and lends them, a run of neighbours per engine.

    Ports named in the configuration are bound when this is made, so that a taken one
    shows at start. A port once bound stays so: libzmq closes a listener some time after
    it was told to, and an engine that comes back at once would find its own port taken.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        base_port: int,
        ranks: int,
        dispatch: Callable[[Event], None],
        counters: Counter[str],
    ) -> None:
        """Binds `base_port` .. `base_port + ranks - 1`, or nothing if `base_port` is 0.

        Raises PortError.
        """
        self._context = context
        self._host = host
        self._dispatch = dispatch
        self._counters = counters
        self._bound: dict[int, SideChannel] = {}
        self._lent: dict[str, list[SideChannel]] = {}
        self._configured = bool(base_port)
        _check_host(host)
        if base_port:
            change = "choose another side_channel.base_port or stop the other process"
            self._bind(range(base_port, base_port + ranks), change)

    @property
    def bound(self) -> list[int]:
        """Every port that is bound now, lent or not."""
        return sorted(self._bound)

    def lend(self, engine_id: str, world_size: int, wanted: int | None) -> list[SideChannel]:
        """The engine's side channels, one per rank: those it has, else new ones.

        `wanted` is the port of world rank 0; None leaves the choice open. Raises PortError.
        """
        if world_size > MAX_RANKS:
            raise PortError(
                f"world_size {world_size}: an engine can have {MAX_RANKS} side channels here"
            )
        channels = self._lent.get(engine_id)
        if channels is not None and (wanted not in (None, channels[0].port)):
            raise PortError(
                f"engine {engine_id} has its side channel at port {channels[0].port} already; "
                f"it cannot move to {wanted}"
            )
        if channels is not None and len(channels) < world_size:
            raise PortError(
                f"engine {engine_id} still has the {len(channels)} side channels of an earlier "
                f"registration, which drains; register world_size {world_size} after that"
            )
        if channels is None:
            channels = self._choose(world_size, wanted)
            for rank, channel in enumerate(channels):
                channel.owner = engine_id, rank
            self._lent[engine_id] = channels
        return channels

    def of(self, engine_id: str) -> list[SideChannel]:
        """The engine's side channels, or none."""
        return self._lent.get(engine_id, [])

    def take_back(self, engine_id: str) -> None:
        """The engine has no registration left: its ports are free for others."""
        for channel in self._lent.pop(engine_id, []):
            channel.owner = channel.metadata = None

    def close(self) -> None:
        self._lent.clear()
        for channel in self._bound.values():
            channel.close()
        self._bound.clear()

    def _choose(self, world_size: int, wanted: int | None) -> list[SideChannel]:
        if wanted is not None:
            change = "give this engine another kv_port, or stop who holds it"
            return self._claim(range(wanted, wanted + world_size), change)
        for first in sorted(self._bound):
            run = range(first, first + world_size)
            if all(p in self._bound and self._bound[p].owner is None for p in run):
                return [self._bound[port] for port in run]
        if self._configured:
            raise PortError(
                f"no {world_size} neighbouring side channel ports are free of "
                f"{min(self._bound)}..{max(self._bound)}; raise side_channel.ranks"
            )
        return self._find_free(world_size)

    def _find_free(self, world_size: int) -> list[SideChannel]:
        for _ in range(_TRIES):
            first = random.randint(_FREE_FROM, _FREE_TO - world_size)
            run = range(first, first + world_size)
            if any(port in self._bound for port in run):
                continue
            try:
                return self._open(run)
            except _CannotBind as failure:
                if failure.errno != errno.EADDRINUSE:
                    raise PortError(f"{failure}; set side_channel.base_port") from None
        raise PortError(
            f"found no {world_size} neighbouring free ports in {_FREE_FROM}..{_FREE_TO}; "
            "set side_channel.base_port"
        )

    def _claim(self, run: range, change: str) -> list[SideChannel]:
        for port in run:
            channel = self._bound.get(port)
            if channel is not None and channel.owner is not None:
                engine_id, rank = channel.owner
                raise PortError(f"port {port} is rank {rank}'s of engine {engine_id}; {change}")
        self._bind([port for port in run if port not in self._bound], change)
        return [self._bound[port] for port in run]

    def _bind(self, ports: Sequence[int], change: str) -> None:
        if ports and ports[-1] > 65_535:
            raise PortError(f"ports {ports[0]}..{ports[-1]} end past 65535; {change}")
        try:
            self._open(ports)
        except _CannotBind as failure:
            whose = owner_of_port(failure.port)
            held = f" (held by {whose})" if whose else ""
            raise PortError(f"{failure}{held}; {change}") from None

    def _open(self, ports: Sequence[int]) -> list[SideChannel]:
        """Bind all of `ports` or none. Raises _CannotBind."""
        channels: list[SideChannel] = []
        for port in ports:
            try:
                channels.append(
                    SideChannel(self._context, self._host, port, self._dispatch, self._counters)
                )
            except zmq.ZMQError as error:
                for channel in channels:
                    channel.close()
                raise _CannotBind(self._host, port, error) from None
        self._bound.update((channel.port, channel) for channel in channels)
        return channels


def _check_host(host: str) -> None:
    """Not only when an engine comes. Raises PortError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        raise PortError(
            f"side_channel.bind_host: this machine cannot listen on {host} "
            f"({error.strerror or error}); give one of its own addresses"
        ) from None
