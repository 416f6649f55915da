"""A ROUTER socket that the event loop drains itself.

zmq.asyncio wakes a future per message; on the machines this was measured on that
costs two thirds of the message rate. Here one readiness callback takes every
message that is there, and whatever it caused to be sent leaves in one go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

# Messages taken in one turn before others get theirs.
BUDGET = 512

OnMessage = Callable[[bytes, list[bytes]], None]


class Unreachable(Exception):
    """The peer of that identity is not connected (any more)."""


class RouterSocket:
    """Binds, reads and writes one ROUTER socket; sending never blocks.

    `on_message(identity, frames)` is called for each message, `after_batch()` when a
    turn has taken what there was. libzmq's file descriptor is edge-triggered: after
    every send and receive the events must be read again, or a message can lie there
    unnoticed (zmq_getsockopt, ZMQ_FD).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: OnMessage,
        after_batch: Callable[[], None] | None = None,
        *,
        max_message_bytes: int,
        high_water_mark: int = 10_000,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._after_batch = after_batch
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
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def bind(self, endpoint: str) -> None:
        """Bind to `endpoint`. Raises zmq.ZMQError."""
        self._socket.bind(endpoint)
        self._wake()

    def send(self, identity: bytes, *frames: bytes) -> bool:
        """Send to a peer. False: its queue is full. Raises Unreachable if it is not connected."""
        try:
            self._socket.send_multipart((identity, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise Unreachable from None
            raise
        if not self._draining:
            self._wake()
        return True

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
        socket, on_message = self._socket, self._on_message
        if socket.closed:
            return
        self._draining = True
        taken = 0
        try:
            while taken < BUDGET:
                try:
                    identity, *frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                taken += 1
                on_message(identity, frames)
            if self._after_batch is not None:
                self._after_batch()
        finally:
            self._draining = False
            if not socket.closed and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._wake()
