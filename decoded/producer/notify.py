"""DONE and FAILED: how a P rank tells a D rank that it writes no more for a request."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import zmq

from decoded.wire.side_channel import ACK, Done, Failed, encode_request

from .sockets import Context, connect


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """As deployed: `tries` times, `timeout_s` for each answer, `pause_s` between tries."""

    tries: int = 3
    timeout_s: float = 1.0
    pause_s: float = 0.1


@dataclass(frozen=True, slots=True)
class Delivery:
    """`acknowledged`: D has the message. `error`: why the last try failed, or empty."""

    acknowledged: bool
    tries: int
    error: str = ""


def notify(
    context: Context,
    host: str,
    port: int,
    message: Done | Failed,
    settings: NotifySettings,
    give_up: threading.Event | None = None,
) -> Delivery:
    """Tell the D rank at `host:port`; blocks for at most all tries. Does not raise for what
    a peer or the network does. `give_up`: once set, no further try is made.
    """
    payload = encode_request(message)
    give_up = give_up or threading.Event()
    error, made = "", 0
    while made < settings.tries:
        if made and give_up.wait(settings.pause_s):
            break
        made += 1
        error = _try_once(context, host, port, payload, int(settings.timeout_s * 1000))
        if not error:
            return Delivery(True, made)
    return Delivery(False, made, error)


def _try_once(context: Context, host: str, port: int, payload: bytes, timeout_ms: int) -> str:
    """One try from a new socket: what failed, or empty."""
    try:
        with connect(context, zmq.REQ, host, port) as socket:
            socket.sndtimeo = timeout_ms
            socket.send(payload)
            if not socket.poll(timeout_ms):
                return f"no answer in {timeout_ms} ms"
            answer = socket.recv()
    except zmq.ZMQError as error:
        return str(error)
    return "" if answer == ACK else f"the answer was {answer[:64]!r}, not ACK"


class Notifier:
    """Sends DONE and FAILED from a few threads, so that a dead D delays nobody else's."""

    def __init__(self, context: Context, settings: NotifySettings, threads: int = 8) -> None:
        self._context = context
        self._settings = settings
        self._give_up = threading.Event()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decoded-notify")

    def send(self, host: str, port: int, message: Done | Failed) -> Future[Delivery]:
        """Queue a message. Raises RuntimeError once closed."""
        return self._pool.submit(
            notify, self._context, host, port, message, self._settings, self._give_up
        )

    def close(self) -> None:
        """Make no further tries, and wait for those under way: one `timeout_s` at most
        for each message that a thread works on or that is still queued.
        """
        self._give_up.set()
        self._pool.shutdown(wait=True)
