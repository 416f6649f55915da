"""GET_META against real ROUTER sockets: the polls, the answers, the cache."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest

from decoded.producer.errors import HandshakeError
from decoded.producer.handshake import (
    HandshakeSettings,
    MetadataCache,
    fetch_metadata,
)
from decoded.producer.sockets import Context, endpoint
from decoded.wire.side_channel import (
    ACK,
    GetMeta,
    LayerMetadata,
    Metadata,
    decode_request,
    encode_error,
    encode_metadata,
)

from .peers import Peer

METADATA = Metadata(15072, {"layers.0": LayerMetadata([0], [4096], [64], [1])}, True)
PATIENT = HandshakeSettings()
QUICK = HandshakeSettings(poll_s=0.05, polls=3)
HOST = "127.0.0.1"


def test_metadata_is_asked_for_and_read(context: Context) -> None:
    with Peer(context, lambda *_: encode_metadata(METADATA)) as peer:
        assert fetch_metadata(context, HOST, peer.port, "cmpl-1-0a", PATIENT) == METADATA
        assert decode_request(peer.next()) == GetMeta("cmpl-1-0a")


def test_a_silent_peer_gets_all_polls_and_one_message(context: Context) -> None:
    with Peer(context, lambda *_: None) as peer:
        began = time.monotonic()
        with pytest.raises(HandshakeError, match=r"did not answer GET_META in 0\.15 s") as caught:
            fetch_metadata(context, HOST, peer.port, "r", QUICK)
        assert time.monotonic() - began >= 0.14
        assert not caught.value.answered
        peer.next()
        assert peer.heard.empty()


def test_nobody_there(context: Context, closed_port: int) -> None:
    with pytest.raises(HandshakeError, match="did not answer"):
        fetch_metadata(context, HOST, closed_port, "r", QUICK)


def test_an_answer_after_the_first_poll_still_counts(context: Context) -> None:
    late = threading.Event()

    def answer(number: int, payload: bytes) -> bytes:
        late.wait(0.15)  # longer than one poll, never set
        return encode_metadata(METADATA)

    settings = HandshakeSettings(poll_s=0.1, polls=50)
    with Peer(context, answer) as peer:
        assert fetch_metadata(context, HOST, peer.port, "r", settings) == METADATA


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (encode_error("rank 0 has no KV registered"), "answered: rank 0 has no KV registered"),
        (ACK, "answered GET_META with ACK"),
        (b"\xc1garbage", "cannot read the answer"),
        (msgspec.msgpack.encode({"te_rpc_port": 1}), "layer_metadata"),
    ],
)
def test_a_wrong_answer_fails_at_once(context: Context, body: bytes, text: str) -> None:
    with (
        Peer(context, lambda *_: body) as peer,
        pytest.raises(HandshakeError, match=text) as caught,
    ):
        fetch_metadata(context, HOST, peer.port, "r", HandshakeSettings(poll_s=60.0))
    assert caught.value.answered


def test_an_address_that_is_none(context: Context) -> None:
    with pytest.raises(HandshakeError, match="cannot ask D at"):
        fetch_metadata(context, "no host", 1, "r", QUICK)


def test_ipv6_hosts_get_brackets() -> None:
    assert endpoint("fd00::7", 20012) == "tcp://[fd00::7]:20012"
    assert endpoint("10.0.0.7", 20012) == "tcp://10.0.0.7:20012"


def test_cache_keeps_the_most_recently_used() -> None:
    cache = MetadataCache(2)
    cache.add("a", 1, METADATA)
    cache.add("a", 2, METADATA)
    assert cache.get("a", 1) is METADATA
    cache.add("b", 1, METADATA)
    assert cache.get("a", 2) is None
    assert cache.get("a", 1) is METADATA
    assert len(cache) == 2
    cache.forget("a", 1)
    cache.forget("a", 9)
    assert cache.get("a", 1) is None
