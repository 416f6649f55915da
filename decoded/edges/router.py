"""A ROUTER socket that the event loop drains itself.

zmq.asyncio wakes a future per message; on the machines this was measured on that
costs two thirds of the message rate. Here one readiness callback takes every
message that is there, and whatever it caused to be sent leaves in one go.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from time import perf_counter

import structlog
import zmq

from .throttle import Throttle

log = structlog.get_logger(__name__)

# Messages and time taken in one turn before others get theirs. The loop's own clock
# would not do: uvloop reads it once per turn.
BUDGET = 512
BUDGET_S = 0.02
# `after_batch` comes after the first message of a turn, so that one that comes alone is answered
# before anything else is looked at, and then so often that peers need not wait for the turn's end.
ANSWER_EVERY = 8
# A peer whose host has died is dropped after about 30 s + 4 * 10 s.
# Whoever does not say that it speaks ZMTP by then, sooner.
_HANDSHAKE_MS = 10_000
_KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_TIMES = 30, 10, 4
# Plain numbers: an operation on pyzmq's enums takes as long as a receive.
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

OnMessage = Callable[[bytes, list[bytes]], None]


class Unreachable(Exception):
    """The peer of that identity is not connected (any more)."""


class RouterSocket:
    """Binds, reads and writes one ROUTER socket; sending never blocks.

    `on_message(identity, frames)` is called for each message, `after_batch()` when a
    turn has taken what there was. libzmq's file descriptor is edge-triggered: after
    every send and receive the events must be read again, or a message can lie there
    unnoticed (zmq_getsockopt, ZMQ_FD).

    What `on_message` or `after_batch` raises is a bug of ours: it is logged and counted
    as `internal_errors`, and takes neither the loop nor other messages with it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: OnMessage,
        counters: Counter[str],
        after_batch: Callable[[], None] | None = None,
        *,
        max_message_bytes: int,
        high_water_mark: int,
    ) -> None:
        """`high_water_mark`: messages that may wait per peer and direction. Beyond it a
        peer that sends is slowed down, and one that does not read gets no more.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._after_batch = after_batch
        self._counters = counters
        self._bugs = Throttle()
        self._paused = False
        self._draining = False
        self._wake_scheduled = False
        self._socket = socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        socket.setsockopt(zmq.RCVHWM, high_water_mark)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.BACKLOG, 1_024)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_EVERY_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_TIMES)
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def bind(self, endpoint: str) -> str:
        """Bind; the endpoint with the port that `*` has become. Raises zmq.ZMQError."""
        self._socket.bind(endpoint)
        self._wake()
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def send(self, identity: bytes, *frames: bytes) -> bool:
        """Send to a peer. False: its queue is full. Raises Unreachable if it is not connected."""
        socket, last = self._socket, len(frames) - 1
        try:
            # Once the identity is taken, the frames that follow it are too.
            socket.send(identity, _MORE)
            for at, frame in enumerate(frames):
                socket.send(frame, _NOBLOCK if at == last else _MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Unreachable from None
            raise
        if not self._draining:
            self._wake()
        return True

    @property
    def closed(self) -> bool:
        return self._socket.closed

    @property
    def paused(self) -> bool:
        return self._paused

    def pause(self) -> None:
        """Take no further message until `resume`; sending goes on."""
        self._paused = True

    def resume(self) -> None:
        """Take messages again."""
        self._paused = False
        self._wake()

    def close(self, linger_ms: int = 0) -> None:
        """Unbind and close; what is queued has `linger_ms` to leave."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger_ms)

    def _wake(self) -> None:
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._wake_scheduled = False
        on_message = self._on_message
        self._draining = True
        taken, until = 0, perf_counter() + BUDGET_S
        try:
            while taken < BUDGET and not self._paused and self._readable():
                identity, frames = self._receive()
                taken += 1
                try:
                    on_message(identity, frames)
                except Exception:  # noqa: BLE001 - logged and counted
                    self._bug("a message could not be handled")
                if taken % ANSWER_EVERY == 1:
                    self._finish_batch()
                if perf_counter() > until:
                    break
            if taken > 1:
                self._finish_batch()
                if not self._paused and self._readable():
                    self._wake()
        finally:
            self._draining = False

    def _finish_batch(self) -> None:
        if self._after_batch is not None:
            try:
                self._after_batch()
            except Exception:  # noqa: BLE001 - logged and counted
                self._bug("what was to be sent could not be")

    def _readable(self) -> bool:
        """Asking costs less than the exception of a receive that finds nothing."""
        socket = self._socket
        return not socket.closed and int(socket.getsockopt(_EVENTS)) & _POLLIN != 0

    def _receive(self) -> tuple[bytes, list[bytes]]:
        """The next message: who sent it, and its frames."""
        # A `zmq.Frame` says whether more follow, which is dear to ask of the socket.
        recv, frames = self._socket.recv, []
        identity = recv(_NOBLOCK)
        more = True
        while more:
            frame = recv(_NOBLOCK, copy=False)
            frames.append(frame.bytes)
            more = frame.more
        return identity, frames

    def _bug(self, what: str) -> None:
        self._counters["internal_errors"] += 1
        if self._bugs.passes():
            log.exception(what, skipped=self._bugs.skipped)
