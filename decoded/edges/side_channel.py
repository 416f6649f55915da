"""One rank's side channel: the ROUTER that deployed producers talk to.

Every message is answered, at once and whatever it was: a producer waits 1.0 s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog
import zmq

from decoded.core import events as ev
from decoded.wire import side_channel as wire

from .router import RouterSocket, Unreachable
from .throttle import Throttle

log = structlog.get_logger(__name__)

MAX_FRAME_BYTES = 64 * 2**10
# Deployed producers have one message under way per connection; ours, its layers' progress.
_HIGH_WATER_MARK = 256

Dispatch = Callable[[ev.Event], None]


class SideChannel:
    """Answers GET_META, DONE, FAILED and layer progress on one port.

    `owner` is the (engine id, rank) served, None while the port is only held;
    `metadata` the encoded answer to GET_META, None while nothing is registered.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        port: int,
        dispatch: Dispatch,
        counters: Counter[str],
    ) -> None:
        """Binds `tcp://host:port`. Raises zmq.ZMQError."""
        self.port = port
        self.owner: tuple[str, int] | None = None
        self.metadata: bytes | None = None
        self._dispatch = dispatch
        self._counters = counters
        self._refusals = Throttle()
        self._router = RouterSocket(
            context,
            self._on_message,
            counters,
            max_message_bytes=MAX_FRAME_BYTES,
            high_water_mark=_HIGH_WATER_MARK,
        )
        address = f"[{host}]" if ":" in host else host
        try:
            self._router.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError:
            self._router.close()
            raise

    def close(self) -> None:
        self._router.close()

    def _on_message(self, identity: bytes, frames: list[bytes]) -> None:
        # A REQ peer sends an empty delimiter first; whoever sends none gets none.
        envelope = frames[:1] if len(frames) > 1 and not frames[0] else []
        body = frames[len(envelope) :]
        answer = wire.encode_error("the daemon failed at this message; see its log")
        try:
            if len(body) == 1:
                answer = self._answer(body[0])
            else:
                answer = self._reject(f"a message has one payload frame, this has {len(body)}")
        finally:
            self._send(identity, *envelope, answer)

    def _send(self, identity: bytes, *frames: bytes) -> None:
        try:
            if not self._router.send(identity, *frames):
                self._counters["side_channel_unanswered"] += 1
        except Unreachable:
            self._counters["side_channel_unanswered"] += 1

    def _answer(self, payload: bytes) -> bytes:
        try:
            message = wire.decode_request(payload)
        except wire.SideChannelError as error:
            return self._reject(str(error))
        if self.owner is None:
            return self._reject("no engine uses this port")
        engine_id, rank = self.owner
        if isinstance(message, wire.GetMeta):
            return self._handshake(engine_id, rank, message)
        heard = message.external_id, message.trans_count, message.sender
        if isinstance(message, wire.Done):
            self._dispatch(ev.SenderDone(engine_id, rank, *heard))
        elif isinstance(message, wire.Failed):
            self._dispatch(ev.SenderFailed(engine_id, rank, *heard))
        else:
            self._dispatch(ev.LayersIn(engine_id, rank, *heard, message.first, message.count))
        return wire.ACK

    def _handshake(self, engine_id: str, rank: int, message: wire.GetMeta) -> bytes:
        if self.metadata is None:
            self._counters["handshakes_refused"] += 1
            if self._refusals.passes():
                log.warning("handshake refused", engine_id=engine_id, rank=rank)
            return wire.encode_error(f"rank {rank} of engine {engine_id} has no KV registered")
        self._counters["handshakes"] += 1
        log.debug("handshake", engine_id=engine_id, rank=rank, request_id=message.request_id)
        return self.metadata

    def _reject(self, why: str) -> bytes:
        self._counters["side_channel_malformed"] += 1
        log.debug("side channel message rejected", port=self.port, why=why)
        return wire.encode_error(why)
