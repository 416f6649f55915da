"""A client that is nothing but a DEALER: for tests of the protocol itself, and as a baseline."""

from __future__ import annotations

from typing import TypeVar

import zmq

from decoded.wire import link as wire

M = TypeVar("M", bound=wire.FromDaemon)


class BareClient:
    """Sends and receives link messages, blocking, and does nothing else by itself."""

    def __init__(self, endpoint: str, timeout_s: float = 10.0) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 10)
        self._socket.set_hwm(100_000)
        self._socket.connect(endpoint)
        self._timeout_ms = int(timeout_s * 1000)

    def send(self, message: wire.FromClient) -> None:
        self._socket.send(wire.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        """Send frames that may be anything."""
        self._socket.send_multipart(frames)

    def receive(self, timeout_s: float | None = None) -> wire.FromDaemon:
        """The next message. Raises TimeoutError if none comes."""
        wait_ms = self._timeout_ms if timeout_s is None else int(timeout_s * 1000)
        if not self._socket.poll(wait_ms):
            raise TimeoutError(f"no message from the daemon within {wait_ms} ms")
        return wire.decode_from_daemon(self._socket.recv())

    def expect(self, kind: type[M], timeout_s: float | None = None) -> M:
        """The next message of that kind; others are passed over. Raises TimeoutError."""
        while True:
            message = self.receive(timeout_s)
            if isinstance(message, kind):
                return message

    def hello(self, engine_id: str, **fields: object) -> wire.Welcome:
        """Take a seat: by default the scheduler's."""
        given = {"session": f"{engine_id}-session", "role": "scheduler", **fields}
        hello = {"protocol": wire.PROTOCOL_VERSION, "engine_id": engine_id, **given}
        self.send(wire.Hello(**hello))  # type: ignore[arg-type]
        return self.expect(wire.Welcome)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def __enter__(self) -> BareClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
