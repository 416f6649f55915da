"""The client's ZMQ socket, drained by hand.

A shell polls `fd` itself instead of asking ZMQ to: that is what makes one round trip
cheap. The descriptor is edge-triggered, and sending may use its edge up, so the rule
is: after every send, and before every sleep, `receive` until nothing is left.
"""

from __future__ import annotations

import zmq

from decoded.wire.link import MAX_FRAME_BYTES

_POLLIN = int(zmq.POLLIN)


class Dealer:
    """One DEALER, replaced by a new one on each reconnect so that no old frame survives.

    Raises ValueError for an endpoint that cannot be connected to.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._context = zmq.Context()
        try:
            self._socket = self._open()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            text = f"cannot connect to {endpoint!r}: {error}; an endpoint is ipc:///a/path"
            raise ValueError(f"{text} or tcp://host:port") from error

    @property
    def fd(self) -> int:
        """The descriptor to poll for reading; another one after `reopen`."""
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def readable(self) -> bool:
        """A frame is here. Looking is what arms the descriptor anew."""
        return int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN != 0

    def reopen(self) -> None:
        """Drop the connection and what is queued on it; connect anew."""
        self._socket.close(linger=0)
        self._socket = self._open()

    def send(self, frames: list[bytes]) -> None:
        """Queue frames for sending; never blocks."""
        for frame in frames:
            self._socket.send(frame, zmq.NOBLOCK)

    def receive(self) -> list[bytes]:
        """All frames that are here now. Messages of more than one frame are not ours."""
        frames: list[bytes] = []
        while self.readable:
            frame = self._socket.recv(zmq.NOBLOCK)
            if self._socket.getsockopt(zmq.RCVMORE):
                self._socket.recv_multipart(zmq.NOBLOCK)
            else:
                frames.append(frame)
        return frames

    def close(self, linger_s: float) -> None:
        """Close; unsent frames get `linger_s` seconds."""
        self._socket.close(linger=int(linger_s * 1000))
        self._context.term()

    def _open(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            # The session bounds what it sends; a send must never block or fail.
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            socket.connect(self.endpoint)
        except BaseException:
            socket.close(linger=0)
            raise
        return socket
