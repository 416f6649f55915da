"""Layer progress: which layers have been written, told to D ranks that asked for it."""

from __future__ import annotations

from collections import OrderedDict

import zmq

from decoded.wire.side_channel import Layers, encode_request

from .sockets import Context, Socket, connect


class ProgressChannel:
    """One DEALER per D rank, the least recently used closed first.

    `send` never waits: what ZMQ cannot take at once is dropped and counted. Progress is
    for people to look at; DONE says everything that matters. Of one thread at a time.
    """

    def __init__(self, context: Context, max_peers: int = 256, queue: int = 256) -> None:
        self._context = context
        self._max_peers = max_peers
        self._queue = queue
        self._sockets: OrderedDict[tuple[str, int], Socket] = OrderedDict()
        self.sent = 0
        self.dropped = 0

    def send(self, host: str, port: int, message: Layers) -> bool:
        """Tell the D rank at `host:port`. False if the message was dropped."""
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


def _drain(socket: Socket) -> None:
    """Drop the ACKs that have come, or they would fill D's queue towards this socket."""
    while True:
        try:
            socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
