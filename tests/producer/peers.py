"""A D rank's side channel reduced to a script: what it heard, and what it answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

import zmq

from decoded.producer.sockets import Context

Answer = Callable[[int, bytes], "bytes | None"]
"""From the number of the message (0 for the first) and its payload to the answer's body;
None leaves the message unanswered."""


class Peer:
    """A ROUTER on a free loopback port, served by a thread. `heard`: (identity, payload)
    pairs in the order in which they came.
    """

    def __init__(self, context: Context, answer: Answer) -> None:
        self._answer = answer
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._stop, stop = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stop.bind(f"inproc://peer-{id(self)}")
        stop.connect(f"inproc://peer-{id(self)}")
        self.heard: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self._thread = threading.Thread(target=self._run, args=(stop,))
        self._thread.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._stop.close()
        self._router.close()

    def next(self, timeout_s: float = 10.0) -> bytes:
        """The payload of the next message."""
        return self.heard.get(timeout=timeout_s)[1]

    def _run(self, stop: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        number = 0
        while True:
            ready = dict(poller.poll())
            if stop in ready:
                stop.close()
                return
            identity, empty, payload = self._router.recv_multipart()
            assert empty == b""
            self.heard.put((identity, payload))
            body = self._answer(number, payload)
            number += 1
            if body is not None:
                self._router.send_multipart([identity, b"", body])
