"""The layerwise side channel: what prefill (P) ranks and decode (D) ranks say to each other.

Byte for byte the messages of vllm-ascend's MooncakeLayerwiseConnector (read at
182b75ea), plus one of our own: layer progress, which a producer may send to a D rank
whose metadata carries the key `decoded_progress`. Deployed peers ignore that key.

P talks REQ (progress: DEALER with an empty delimiter frame), D a ROUTER. Requests are
msgpack arrays whose first item, the tag, is a msgpack bin. A request that is not
exactly one of the four below is an error: deployed producers send nothing else.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

ACK = b"ACK"
"""The answer to everything but GET_META: three raw bytes, not msgpack."""

MAX_REQUEST_BYTES = 64 * 2**10
MAX_METADATA_BYTES = 4 * 2**20
MAX_TRANS_COUNT = 65536

PROGRESS_KEY = "decoded_progress"
PROGRESS_VERSION = 1

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Sender = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TransCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_TRANS_COUNT)]
LayerIndex = Annotated[int, msgspec.Meta(ge=0, le=65535)]
LayerCount = Annotated[int, msgspec.Meta(ge=1, le=65536)]


class SideChannelError(ValueError):
    """Bytes that are not a message of the side channel; the text says what is wrong."""


class Tag(bytes, enum.Enum):
    """First item of a request. Deployed peers send it as msgpack bin, never as str."""

    GET_META = b"get_meta_msg"
    DONE = b"done_sending_msg"
    FAILED = b"failed_sending_msg"
    LAYERS = b"layers_in_msg"


class GetMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """P asks for the rank's metadata. `request_id`: the request P needs it for."""

    request_id: RequestId


class Done(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A P rank has written all it has for a request.

    `trans_count`: how many distinct senders this D rank hears from for the request.
    `sender`: "host:port" of the P rank, IPv6 hosts without brackets.
    """

    external_id: RequestId
    trans_count: TransCount
    sender: Sender


class Failed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A P rank gave up a request and writes no more for it. Fields as in `Done`."""

    external_id: RequestId
    trans_count: TransCount
    sender: Sender


class Layers(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A P rank has written layers `first` .. `first + count - 1`. Our own message."""

    external_id: RequestId
    trans_count: TransCount
    sender: Sender
    first: LayerIndex
    count: LayerCount


Request = GetMeta | Done | Failed | Layers

_TAGS: dict[type[Request], Tag] = {
    GetMeta: Tag.GET_META,
    Done: Tag.DONE,
    Failed: Tag.FAILED,
    Layers: Tag.LAYERS,
}
_KINDS: dict[bytes, type[Request]] = {tag.value: kind for kind, tag in _TAGS.items()}

_encoder = msgspec.msgpack.Encoder()
_array = msgspec.msgpack.Decoder(list[Any])


def encode_request(message: Request) -> bytes:
    """The payload frame of a request, as a deployed producer would write it."""
    return _encoder.encode([_TAGS[type(message)].value, *msgspec.structs.astuple(message)])


def decode_request(payload: bytes | memoryview) -> Request:
    """The request in a payload frame. Raises SideChannelError and nothing else."""
    if len(payload) > MAX_REQUEST_BYTES:
        raise SideChannelError(
            f"the payload has {len(payload)} bytes, more than {MAX_REQUEST_BYTES}"
        )
    try:
        items = _array.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise SideChannelError(f"the payload is not a msgpack array: {error}") from None
    tag = items[0] if items else None
    if not isinstance(tag, bytes):
        raise SideChannelError("the first item of the payload is not a tag of type bin")
    kind = _KINDS.get(tag)
    if kind is None:
        raise SideChannelError(f"unknown tag {tag[:64]!r}")
    arity = len(kind.__struct_fields__)
    if len(items) != arity + 1:
        raise SideChannelError(
            f"{_TAGS[kind].name} has {arity} items after its tag, not {len(items) - 1}"
        )
    try:
        return msgspec.convert(items[1:], kind)
    except msgspec.ValidationError as error:
        raise SideChannelError(f"{_TAGS[kind].name}: {error}") from None


class LayerMetadata(msgspec.Struct, frozen=True):
    """Where one layer of a D rank lies: one item per tensor (K and V, or the MLA parts).

    `tensor_group_idx`: the KV group. `kv_caches_base_addr`: address of kernel block 0,
    in the process that registered the memory. `block_len`: bytes of a kernel block.
    `block_size_scale`: kernel blocks per block.
    """

    tensor_group_idx: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]
    kv_caches_base_addr: list[Annotated[int, msgspec.Meta(ge=0)]]
    block_len: list[Annotated[int, msgspec.Meta(ge=1, le=2**48)]]
    block_size_scale: list[Annotated[int, msgspec.Meta(ge=1, le=65536)]]


class Metadata(msgspec.Struct, frozen=True):
    """Answer to GET_META. Layers keep their order. `progress`: D takes layer progress."""

    te_rpc_port: int
    layer_metadata: dict[str, LayerMetadata]
    progress: bool = False


class _MetadataIn(msgspec.Struct):
    te_rpc_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    layer_metadata: Annotated[dict[str, LayerMetadata], msgspec.Meta(max_length=4096)]
    decoded_progress: msgspec.Raw = msgspec.Raw(b"\x00")


_metadata = msgspec.msgpack.Decoder(_MetadataIn)
_progress = msgspec.msgpack.Decoder(int)


def encode_metadata(metadata: Metadata) -> bytes:
    """The body that answers GET_META. Our own key, if there is one, comes last."""
    body: dict[str, Any] = {
        "te_rpc_port": metadata.te_rpc_port,
        "layer_metadata": metadata.layer_metadata,
    }
    if metadata.progress:
        body[PROGRESS_KEY] = PROGRESS_VERSION
    return _encoder.encode(body)


def decode_metadata(body: bytes | memoryview) -> Metadata:
    """The metadata in an answer to GET_META; unknown keys are ignored.

    Raises SideChannelError and nothing else. Where the answer is an error of
    `encode_error`, the exception's text is that error.
    """
    if len(body) > MAX_METADATA_BYTES:
        raise SideChannelError(
            f"the metadata has {len(body)} bytes, more than {MAX_METADATA_BYTES}"
        )
    try:
        found = _metadata.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        text = decode_error(body)
        raise SideChannelError(text or f"not metadata: {error}") from None
    for name, layer in found.layer_metadata.items():
        lengths = {len(column) for column in msgspec.structs.astuple(layer)}
        if len(lengths) != 1 or lengths == {0}:
            raise SideChannelError(
                f"layer {name!r}: the four lists need one item per tensor, "
                f"their lengths are {sorted(lengths)}"
            )
    return Metadata(
        te_rpc_port=found.te_rpc_port,
        layer_metadata=found.layer_metadata,
        progress=_takes_progress(found.decoded_progress),
    )


def _takes_progress(value: msgspec.Raw) -> bool:
    """Whether D takes progress. A later version may say more; this one reads just that."""
    try:
        return _progress.decode(value) >= PROGRESS_VERSION
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return False


class _ErrorAnswer(msgspec.Struct):
    error: str


_error = msgspec.msgpack.Decoder(_ErrorAnswer)


def encode_error(text: str) -> bytes:
    """An answer that makes a deployed producer fail at once: it is neither ACK nor
    metadata, since the required keys are missing. `text` is for our own producer's log.
    """
    return _encoder.encode({"error": text})


def decode_error(body: bytes | memoryview) -> str | None:
    """The text of an `encode_error` answer, or None if the body is something else."""
    try:
        return _error.decode(body).error
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
