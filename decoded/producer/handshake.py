"""GET_META: how a P rank learns where a D rank's KV memory is."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import zmq

from decoded.wire.side_channel import (
    ACK,
    GetMeta,
    Metadata,
    SideChannelError,
    decode_error,
    decode_metadata,
    encode_request,
)

from .errors import HandshakeError
from .sockets import Context, connect, endpoint


@dataclass(frozen=True, slots=True)
class HandshakeSettings:
    """As deployed: an answer is waited for `polls` times, `poll_s` seconds each."""

    poll_s: float = 1.0
    polls: int = 3


def fetch_metadata(
    context: Context, host: str, port: int, request_id: str, settings: HandshakeSettings
) -> Metadata:
    """Ask the D rank at `host:port`; blocks until it answers. Raises HandshakeError.

    An error answer ends the wait at once and its text is passed on.
    """
    where = endpoint(host, port)
    poll_ms = int(settings.poll_s * 1000)
    try:
        with connect(context, zmq.REQ, host, port) as socket:
            socket.sndtimeo = poll_ms
            socket.send(encode_request(GetMeta(request_id)))
            if not any(socket.poll(poll_ms) for _ in range(settings.polls)):
                raise HandshakeError(
                    f"D at {where} did not answer GET_META in "
                    f"{settings.poll_s * settings.polls:g} s"
                )
            body = socket.recv()
    except zmq.ZMQError as error:
        raise HandshakeError(f"cannot ask D at {where}: {error}") from error
    if (text := decode_error(body)) is not None:
        raise HandshakeError(f"D at {where} answered: {text}", answered=True)
    if body == ACK:
        raise HandshakeError(f"D at {where} answered GET_META with ACK", answered=True)
    try:
        return decode_metadata(body)
    except SideChannelError as error:
        text = f"cannot read the answer of D at {where}: {error}"
        raise HandshakeError(text, answered=True) from error


class MetadataCache:
    """Answers to GET_META by (remote engine id, port), the least recently used given up first.

    An engine id stands for its addresses for ever, so nothing grows stale; any thread may
    use the cache.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, int], Metadata] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, engine_id: str, port: int) -> Metadata | None:
        with self._lock:
            metadata = self._entries.get((engine_id, port))
            if metadata is not None:
                self._entries.move_to_end((engine_id, port))
            return metadata

    def add(self, engine_id: str, port: int, metadata: Metadata) -> None:
        with self._lock:
            self._entries[engine_id, port] = metadata
            self._entries.move_to_end((engine_id, port))
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def forget(self, engine_id: str, port: int) -> None:
        """Ask again next time, after a write to these addresses failed."""
        with self._lock:
            self._entries.pop((engine_id, port), None)
