"""Layer progress: which layers have been written, told to D ranks that asked for it."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import zmq

from decoded.wire.side_channel import Layers, encode_request

from .sockets import Context, Socket, connect

EVERY_S = 0.02


class ProgressChannel:
    """One DEALER per D rank, the least recently used closed first.

    `send` never waits: what ZMQ cannot take at once is dropped and counted. Progress is
    for people to look at; DONE says everything that matters. Any thread may call.
    """

    def __init__(self, context: Context, max_peers: int = 256, queue: int = 256) -> None:
        self._context = context
        self._max_peers = max_peers
        self._queue = queue
        self._lock = threading.Lock()
        self._sockets: OrderedDict[tuple[str, int], Socket] = OrderedDict()
        self.sent = 0
        self.dropped = 0

    def send(self, host: str, port: int, message: Layers) -> bool:
        """Tell the D rank at `host:port`. False if the message was dropped."""
        with self._lock:
            try:
                socket = self._socket(host, port)
                _drain(socket)
                socket.send_multipart((b"", encode_request(message)), zmq.DONTWAIT)
            except zmq.ZMQError:  # Again: the queue is full; else: the address is unusable
                self.dropped += 1
                return False
            self.sent += 1
            return True

    def close(self) -> None:
        """Close all sockets; what is still queued is lost."""
        with self._lock:
            while self._sockets:
                self._sockets.popitem()[1].close()

    def _socket(self, host: str, port: int) -> Socket:
        socket = self._sockets.get((host, port))
        if socket is None:
            while len(self._sockets) >= self._max_peers:
                self._sockets.popitem(last=False)[1].close()
            socket = connect(self._context, zmq.DEALER, host, port, self._queue)
            self._sockets[host, port] = socket
        self._sockets.move_to_end((host, port))
        return socket


class PushProgress:
    """What one push tells of its layers: the first one at once, then the last ones together,
    at most every `EVERY_S`. On a small machine a message per layer would cost a fast push a
    tenth of its bandwidth.

    `message(first, count)` makes the message for a run of layers.
    """

    def __init__(
        self,
        channel: ProgressChannel,
        host: str,
        port: int,
        message: Callable[[int, int], Layers],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._host, self._port = host, port
        self._message = message
        self._clock = clock
        self._first = self._count = 0
        self._sent_at = -math.inf

    def written(self, layer: int) -> None:
        """A layer is in D's memory."""
        if self._count and layer != self._first + self._count:
            self.flush()
        if not self._count:
            self._first = layer
        self._count += 1
        if self._clock() - self._sent_at >= EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Tell what has not been told."""
        if self._count:
            self._channel.send(self._host, self._port, self._message(self._first, self._count))
            self._first, self._count = 0, 0
            self._sent_at = self._clock()


def _drain(socket: Socket) -> None:
    """Drop the ACKs that have come, or they would fill D's queue towards this socket."""
    while True:
        try:
            socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
