"""The side channel codec against golden payloads, random messages and hostile bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoded.wire import side_channel as sc

from .fuzzing import BOMBS, damaged
from .strategies import messages

GOLDEN = Path(__file__).parent / "golden"
VECTORS: list[dict[str, Any]] = [
    vector
    for name in ("layerwise_wire.json", "decoded_extensions.json")
    for vector in json.loads((GOLDEN / name).read_text())["vectors"]
]
KINDS: dict[str, type[sc.Request]] = {
    "GET_META": sc.GetMeta,
    "DONE": sc.Done,
    "FAILED": sc.Failed,
    "LAYERS": sc.Layers,
}
REQUESTS = st.one_of([messages(kind) for kind in KINDS.values()])


@st.composite
def _layers(draw: st.DrawFn) -> sc.LayerMetadata:
    count = draw(st.integers(1, 4))

    def column(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    return sc.LayerMetadata(
        tensor_group_idx=column(0, 255),
        kv_caches_base_addr=column(0, 2**64 - 1),
        block_len=column(1, 2**48),
        block_size_scale=column(1, 65536),
    )


METADATA = st.builds(
    sc.Metadata,
    te_rpc_port=st.integers(1, 65535),
    layer_metadata=st.dictionaries(st.text(min_size=1, max_size=20), _layers(), max_size=4),
    progress=st.booleans(),
)


def _request(meaning: dict[str, Any]) -> sc.Request:
    items = list(meaning.values())
    return KINDS[items[0]](*items[1:])


def _metadata(meaning: dict[str, Any]) -> sc.Metadata:
    layers = {name: sc.LayerMetadata(**layer) for name, layer in meaning["layers"].items()}
    return sc.Metadata(meaning["te_rpc_port"], layers, meaning.get("progress", False))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))
def test_golden_vector_both_ways(vector: dict[str, Any]) -> None:
    payload, meaning = bytes.fromhex(vector["payload_hex"]), vector["meaning"]
    if vector["direction"] == "P->D":
        assert sc.decode_request(payload) == _request(meaning)
        assert sc.encode_request(_request(meaning)) == payload
    elif "error" in meaning:
        assert sc.encode_error(meaning["error"]) == payload
        assert sc.decode_error(payload) == meaning["error"]
        with pytest.raises(sc.SideChannelError, match=meaning["error"]):
            sc.decode_metadata(payload)
    else:
        found = sc.decode_metadata(payload)
        assert found == _metadata(meaning)
        assert list(found.layer_metadata) == list(meaning["layers"])
        assert sc.encode_metadata(_metadata(meaning)) == payload


def test_every_request_kind_has_a_golden_vector() -> None:
    seen = {v["meaning"]["type"] for v in VECTORS if v["direction"] == "P->D"}
    assert seen == set(KINDS)


@given(REQUESTS)
def test_requests_round_trip(message: sc.Request) -> None:
    payload = sc.encode_request(message)
    assert sc.decode_request(payload) == message
    assert sc.decode_request(memoryview(payload)) == message


@given(METADATA)
def test_metadata_round_trips(metadata: sc.Metadata) -> None:
    found = sc.decode_metadata(sc.encode_metadata(metadata))
    assert found == metadata
    assert list(found.layer_metadata) == list(metadata.layer_metadata)


@given(METADATA)
def test_progress_is_the_last_key_and_deployed_readers_ignore_it(metadata: sc.Metadata) -> None:
    body = msgspec.msgpack.decode(sc.encode_metadata(metadata))
    wanted = ["te_rpc_port", "layer_metadata"] + ["decoded_progress"] * metadata.progress
    assert list(body) == wanted
    body.pop("decoded_progress", None)
    bare = sc.decode_metadata(msgspec.msgpack.encode(body))
    assert bare == msgspec.structs.replace(metadata, progress=False)


@pytest.mark.parametrize(
    ("value", "progress"),
    [(0, False), (1, True), (2, True), (True, False), ("1", False), ([[]], False), (None, False)],
)
def test_progress_key_of_other_versions(value: object, progress: bool) -> None:
    body = {"te_rpc_port": 1, "layer_metadata": {}, "more": [1], "decoded_progress": value}
    assert sc.decode_metadata(msgspec.msgpack.encode(body)).progress is progress


DONE = [b"done_sending_msg", "cmpl-1", 1, "10.0.0.7:20012"]


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (["done_sending_msg", "cmpl-1", 1, "a:1"], "tag of type bin"),
        ([], "tag of type bin"),
        ([b"done_sending", "cmpl-1", 1, "a:1"], "unknown tag"),
        (DONE[:3], "DONE has 3 items after its tag, not 2"),
        ([*DONE, 0], "DONE has 3 items after its tag, not 4"),
        ([b"get_meta_msg"], "GET_META has 1 items"),
        ([b"done_sending_msg", b"cmpl-1", 1, "a:1"], "got `bytes`"),
        ([b"done_sending_msg", "", 1, "a:1"], "length >= 1"),
        ([b"done_sending_msg", "x" * 513, 1, "a:1"], "length <= 512"),
        ([b"done_sending_msg", "cmpl-1", 1, "x" * 257], "length <= 256"),
        ([b"done_sending_msg", "cmpl-1", 0, "a:1"], "`int` >= 1"),
        ([b"failed_sending_msg", "cmpl-1", -1, "a:1"], "`int` >= 1"),
        ([b"done_sending_msg", "cmpl-1", 65537, "a:1"], "`int` <= 65536"),
        ([b"done_sending_msg", "cmpl-1", 1.0, "a:1"], "got `float`"),
        ([b"done_sending_msg", "cmpl-1", True, "a:1"], "got `bool`"),
        ([b"done_sending_msg", "cmpl-1", "1", "a:1"], "got `str`"),
        ([b"layers_in_msg", "cmpl-1", 1, "a:1", -1, 1], "`int` >= 0"),
        ([b"layers_in_msg", "cmpl-1", 1, "a:1", 0, 0], "`int` >= 1"),
        ({b"done_sending_msg": 1}, "not a msgpack array"),
        (b"done_sending_msg", "not a msgpack array"),
    ],
)
def test_what_no_deployed_producer_sends_is_an_error(payload: object, text: str) -> None:
    with pytest.raises(sc.SideChannelError, match=text):
        sc.decode_request(msgspec.msgpack.encode(payload))


def test_a_second_object_in_the_payload_is_an_error() -> None:
    with pytest.raises(sc.SideChannelError):
        sc.decode_request(sc.encode_request(sc.Done("a", 1, "b:1")) + b"\xc0")


def test_oversized_payloads_are_refused_unread() -> None:
    with pytest.raises(sc.SideChannelError, match="more than 65536"):
        sc.decode_request(bytes(sc.MAX_REQUEST_BYTES + 1))
    with pytest.raises(sc.SideChannelError, match="more than"):
        sc.decode_metadata(bytes(sc.MAX_METADATA_BYTES + 1))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"block_len": [1]}, "one item per tensor"),
        ({"block_len": [0, 1]}, ">= 1"),
        ({"block_size_scale": [0, 1]}, ">= 1"),
        ({"kv_caches_base_addr": [-1, 1]}, ">= 0"),
        ({"kv_caches_base_addr": ["1", 1]}, "got `str`"),
    ],
)
def test_metadata_that_makes_no_sense(change: dict[str, Any], text: str) -> None:
    layer = {
        "tensor_group_idx": [0, 0],
        "kv_caches_base_addr": [1, 2],
        "block_len": [8, 8],
        "block_size_scale": [1, 1],
    }
    body = {"te_rpc_port": 15000, "layer_metadata": {"layers.0": layer | change}}
    with pytest.raises(sc.SideChannelError, match=text):
        sc.decode_metadata(msgspec.msgpack.encode(body))


def test_metadata_with_no_tensors_or_missing_keys() -> None:
    empty: dict[str, list[int]] = {key: [] for key in sc.LayerMetadata.__struct_fields__}
    body = {"te_rpc_port": 15000, "layer_metadata": {"layers.0": empty}}
    with pytest.raises(sc.SideChannelError, match="one item per tensor"):
        sc.decode_metadata(msgspec.msgpack.encode(body))
    for answer in (b"ACK", b"", msgspec.msgpack.encode({"te_rpc_port": 1})):
        with pytest.raises(sc.SideChannelError, match="not metadata"):
            sc.decode_metadata(answer)


def _survives(data: bytes) -> None:
    """Anything may come back but another exception; what is accepted is a message."""
    try:
        message = sc.decode_request(data)
    except sc.SideChannelError:
        pass
    else:
        assert sc.decode_request(sc.encode_request(message)) == message
    try:
        metadata = sc.decode_metadata(data)
    except sc.SideChannelError:
        pass
    else:
        assert sc.decode_metadata(sc.encode_metadata(metadata)) == metadata
    error = sc.decode_error(data)
    assert error is None or sc.decode_error(sc.encode_error(error)) == error


@settings(max_examples=400)
@given(st.binary(max_size=200))
def test_noise(data: bytes) -> None:
    _survives(data)


@settings(max_examples=600)
@given(damaged(REQUESTS.map(sc.encode_request) | METADATA.map(sc.encode_metadata)))
@example(b"\x92\xc4\x0cget_meta_msg\xd9\xff")
def test_damaged_frames(data: bytes) -> None:
    _survives(data)


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: f"{bomb[:6].hex()}-{len(bomb)}")
def test_bombs_cost_little_memory(bomb: bytes) -> None:
    tracemalloc.start()
    try:
        _survives(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20
