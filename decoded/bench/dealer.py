"""A DEALER that speaks the protocol and does nothing else: it shows what the daemon costs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import zmq

from decoded.wire import link as wire

# Numbers are cumulative, and the client library acknowledges as rarely.
ACKNOWLEDGE_EVERY = 256
# Requests in one submit message at most.
BATCH = 128
_TIMEOUT_S = 30

M = TypeVar("M", bound=wire.FromDaemon)


def connect(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, kind: int = zmq.DEALER
) -> zmq.Socket[bytes]:
    """A blocking socket without bounds on what is queued; zmq.Again after 30 s of waiting."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RCVTIMEO, _TIMEOUT_S * 1_000)
    socket.connect(endpoint)
    return socket


class Dealer:
    """One client of the daemon, blocking. Every message it sends is a sign of life."""

    def __init__(self, endpoint: str, engine_id: str, **hello: object) -> None:
        """Takes a seat, by default the scheduler's. `hello`: further fields of the message."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = connect(self._context, endpoint)
        self._seen = self._acknowledged = 0
        fields = {"session": f"{engine_id}-bench", "role": "scheduler", **hello}
        self.send(wire.Hello(wire.PROTOCOL_VERSION, engine_id, **fields))  # type: ignore[arg-type]
        self.expect(wire.Welcome)

    def send(self, message: wire.FromClient) -> None:
        self._socket.send(wire.encode(message))

    def expect(self, kind: type[M]) -> M:
        """The next message, which is to be of that kind; heartbeats are passed over.

        Raises RuntimeError for another one, TimeoutError for none.
        """
        while True:
            try:
                message = wire.decode_from_daemon(self._socket.recv())
            except zmq.Again:
                text = f"the daemon sent no {kind.__name__} within {_TIMEOUT_S} s"
                raise TimeoutError(text) from None
            if isinstance(message, kind):
                return message
            if not isinstance(message, wire.Heartbeat):
                raise RuntimeError(f"the daemon sent {message}, not {kind.__name__}")

    def heartbeat(self, token: int) -> None:
        """Go to the daemon and back, behind all that was sent before."""
        self.send(wire.Heartbeat(token))
        while self.expect(wire.Heartbeat).token != token:
            pass

    def finished(self) -> list[wire.OutcomeItem]:
        """The next outcomes, acknowledged now and then."""
        message = self.expect(wire.Finished)
        self._seen = message.first + len(message.outcomes) - 1
        if self._seen - self._acknowledged >= ACKNOWLEDGE_EVERY:
            self._acknowledged = self._seen
            self.send(wire.Acknowledge(message.log, self._seen))
        return message.outcomes

    def outcomes(self, count: int, state: str = "done") -> None:
        """Take the next `count` outcomes. Raises RuntimeError if one has another state."""
        while count > 0:
            ended = self.finished()
            wrong = next((outcome for outcome in ended if outcome.state != state), None)
            if wrong is not None:
                raise RuntimeError(f"a request did not end as {state}: {wrong}")
            count -= len(ended)

    def submit(self, requests: Sequence[wire.Submission]) -> None:
        """Submit in messages of up to BATCH requests."""
        for at in range(0, len(requests), BATCH):
            self.send(wire.Submit(list(requests[at : at + BATCH])))

    def latencies(self, requests: Sequence[wire.Submission]) -> list[float]:
        """Submit to finished of each request alone, in seconds."""
        clock, found = time.perf_counter, []
        for request in requests:
            began = clock()
            self.send(wire.Submit([request]))
            ended = self.finished()
            found.append(clock() - began)
            if ended[0].state != "done":
                raise RuntimeError(f"a request did not end as done: {ended[0]}")
        return found

    def rate(self, in_flight: int, requests: Sequence[wire.Submission]) -> float:
        """Requests per second with `in_flight` of them under way."""
        total = len(requests)
        sent, done = min(in_flight, total), 0
        began = time.perf_counter()
        self.submit(requests[:sent])
        while done < total:
            ended = len(self.finished())
            done += ended
            if sent < total:
                self.submit(requests[sent : sent + ended])
                sent += ended
        return total / (time.perf_counter() - began)

    def close(self) -> None:
        self.send(wire.Bye())
        self._socket.close(linger=1_000)
        self._context.term()

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
