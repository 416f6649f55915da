"""The engine link codec against golden frames, random messages and hostile bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decoded.wire import link

from .fuzzing import BOMBS, damaged
from .strategies import messages

GOLDEN = json.loads((Path(__file__).parent / "golden" / "link.json").read_text())
VECTORS: list[dict[str, Any]] = GOLDEN["vectors"]
FROM_CLIENT: tuple[type[link.Message], ...] = link.FromClient.__args__
FROM_DAEMON: tuple[type[link.Message], ...] = link.FromDaemon.__args__
CLIENT_FRAMES = st.one_of([messages(kind) for kind in FROM_CLIENT]).map(link.encode)
DAEMON_FRAMES = st.one_of([messages(kind) for kind in FROM_DAEMON]).map(link.encode)


def _kind(message: type[link.Message]) -> str:
    return str(message.__struct_config__.tag)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))
def test_golden_vector_both_ways(vector: dict[str, Any]) -> None:
    frame, meaning = bytes.fromhex(vector["frame_hex"]), vector["meaning"]
    if vector["direction"] == "client->daemon":
        message: Any = msgspec.convert(meaning, link.FromClient)
        found: Any = link.decode_from_client(frame)
    else:
        message = msgspec.convert(meaning, link.FromDaemon)
        found = link.decode_from_daemon(frame)
    assert found == message
    assert _kind(type(found)) == meaning["kind"]
    assert link.encode(message) == frame
    assert msgspec.msgpack.decode(frame) == meaning


def test_every_kind_has_a_golden_vector() -> None:
    assert GOLDEN["protocol"] == link.PROTOCOL_VERSION
    for direction, kinds in (("client->daemon", FROM_CLIENT), ("daemon->client", FROM_DAEMON)):
        seen = {v["meaning"]["kind"] for v in VECTORS if v["direction"] == direction}
        assert seen == {_kind(kind) for kind in kinds}


@pytest.mark.parametrize("kind", FROM_CLIENT, ids=_kind)
def test_client_messages_round_trip(kind: type[link.Message]) -> None:
    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    @given(messages(kind))
    def check(message: Any) -> None:
        assert link.decode_from_client(link.encode(message)) == message

    check()


@pytest.mark.parametrize("kind", FROM_DAEMON, ids=_kind)
def test_daemon_messages_round_trip(kind: type[link.Message]) -> None:
    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    @given(messages(kind))
    def check(message: Any) -> None:
        assert link.decode_from_daemon(link.encode(message)) == message

    check()


@pytest.mark.parametrize("kind", FROM_CLIENT, ids=_kind)
def test_unknown_keys_of_a_newer_peer_are_ignored(kind: type[link.Message]) -> None:
    vector = next(v for v in VECTORS if v["meaning"]["kind"] == _kind(kind))
    frame = msgspec.msgpack.encode(vector["meaning"] | {"later": [{"a": 1}]})
    known = link.decode_from_client(bytes.fromhex(vector["frame_hex"]))
    assert link.decode_from_client(frame) == known


def test_unknown_kind_names_the_version_and_the_kinds() -> None:
    with pytest.raises(link.WireError) as caught:
        link.decode_from_client(msgspec.msgpack.encode({"kind": "fetch", "token": 4}))
    assert caught.value.code == "unknown_kind"
    assert caught.value.about == "fetch"
    assert "protocol version 1 has no message 'fetch'" in str(caught.value)
    assert all(_kind(kind) in str(caught.value) for kind in FROM_CLIENT)


def test_a_kind_of_the_other_direction_is_unknown() -> None:
    with pytest.raises(link.WireError, match="no message 'finished'"):
        link.decode_from_client(link.encode(link.Finished("log", 0, [])))
    with pytest.raises(link.WireError, match="no message 'bye'"):
        link.decode_from_daemon(link.encode(link.Bye()))


@pytest.mark.parametrize("kind", ["x" * 5000, "fétch\n\x00"])
def test_a_long_or_odd_kind_does_not_swell_the_answer(kind: str) -> None:
    with pytest.raises(link.WireError) as caught:
        link.decode_from_client(msgspec.msgpack.encode({"kind": kind}))
    assert caught.value.code == "unknown_kind"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("token", [9, 0, 2**63 - 1])
def test_an_invalid_message_is_answered_under_its_token(token: int) -> None:
    frame = {"kind": "register_kv", "token": token, "memory": {"source": "floppy"}}
    with pytest.raises(link.WireError, match=r"register_kv: .*floppy") as caught:
        link.decode_from_client(msgspec.msgpack.encode(frame))
    assert (caught.value.code, caught.value.token) == ("invalid", token)


@pytest.mark.parametrize("token", [-1, 2**63, True, "9", None, [1], 1.5])
def test_a_token_that_is_none_is_not_repeated(token: object) -> None:
    with pytest.raises(link.WireError, match="unregister_kv: ") as caught:
        link.decode_from_client(msgspec.msgpack.encode({"kind": "unregister_kv", "token": token}))
    assert (caught.value.code, caught.value.token) == ("invalid", None)


@pytest.mark.parametrize("value", [None, 3, "hello", [], {}, {"kind": 3}, {"token": 1}, {1: 2}])
def test_msgpack_that_is_no_message(value: object) -> None:
    with pytest.raises(link.WireError, match="map with a text under 'kind'") as caught:
        link.decode_from_client(msgspec.msgpack.encode(value))
    assert caught.value.code == "malformed"


def _survives(frame: bytes) -> None:
    """A message or a WireError comes back, and that error can be sent as an answer."""
    for decode in (link.decode_from_client, link.decode_from_daemon):
        outcome: object
        try:
            outcome = decode(frame)
        except link.WireError as error:
            outcome = link.Error(error.code, str(error), error.about, error.token)
            assert link.decode_from_daemon(link.encode(outcome)) == outcome
        assert isinstance(outcome, link.Message)


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_noise(frame: bytes) -> None:
    _survives(frame)


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
@given(damaged(CLIENT_FRAMES | DAEMON_FRAMES))
def test_damaged_frames(frame: bytes) -> None:
    _survives(frame)


_IN_ANY = b"\x84\xa4kind\xadstatus_report\xa5token\x01\xa6status\x81\xa1a"


@pytest.mark.parametrize("prefix", [b"", b"\x82\xa4kind\xa6submit\xa8requests", _IN_ANY])
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: f"{bomb[:6].hex()}-{len(bomb)}")
def test_bombs_cost_little_memory(prefix: bytes, bomb: bytes) -> None:
    tracemalloc.start()
    try:
        _survives(prefix + bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20


def test_a_large_frame_of_no_known_shape_is_not_built() -> None:
    frame = b"\xdd\x00\x10\x00\x00" + b"\x90" * 2**20
    fetch = b"\x82\xa4kind\xa5fetch\xa1x" + frame
    tracemalloc.start()
    try:
        _survives(frame)
        _survives(fetch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20
