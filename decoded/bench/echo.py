"""The control path's baseline: a blocking ROUTER that sends every message back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import zmq

from .dealer import connect


def serve(endpoint: str) -> None:
    """Echo until standard input ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    # Nothing may be dropped, however many messages are in flight.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(endpoint)
    threading.Thread(target=_end_with_input, daemon=True).start()
    while True:
        socket.send_multipart(socket.recv_multipart())


def _end_with_input() -> None:
    # Unbuffered: the interpreter may end without a lock on the buffer.
    while os.read(sys.stdin.fileno(), 4_096):
        pass
    os._exit(0)


class Echo:
    """An echo in a process of its own, and a blocking DEALER that talks to it."""

    def __init__(self, endpoint: str, message_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, endpoint], stdin=subprocess.PIPE
        )
        self._payload = bytes(message_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect(self._context, endpoint)

    def latencies(self, count: int) -> list[float]:
        """Round trips of single messages, in seconds."""
        send, recv, payload = self._socket.send, self._socket.recv, self._payload
        clock, found = time.perf_counter, []
        for _ in range(count):
            began = clock()
            send(payload)
            recv()
            found.append(clock() - began)
        return found

    def rate(self, in_flight: int, count: int) -> float:
        """Messages per second with `in_flight` of `count` under way."""
        send, recv, payload = self._socket.send, self._socket.recv, self._payload
        first = min(in_flight, count)
        began = time.perf_counter()
        for _ in range(first):
            send(payload)
        for _ in range(count - first):
            recv()
            send(payload)
        for _ in range(first):
            recv()
        return count / (time.perf_counter() - began)

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        self._process.communicate(timeout=10)

    def __enter__(self) -> Echo:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if __name__ == "__main__":
    serve(sys.argv[1])
