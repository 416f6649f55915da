"""The engine link: one msgpack map per message, over DEALER (client) and ROUTER (daemon).

Each message is one frame. The map's `kind` names the message; unknown keys are
ignored, unknown kinds are an error. docs/protocol.md describes the conversation.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from .layout import KvLayout, KvMemory, Port

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 * 2**20

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Attempt = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Token = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
BlockIds = list[list[BlockId]]


class Message(msgspec.Struct, tag_field="kind", omit_defaults=True):
    """Base of all messages; the tag is the message's kind."""


# Client to daemon


class Hello(Message, tag="hello"):
    """First message of a session.

    `session`: random, the same for as long as the client lives. `rank` and
    `world_size` count the engine's worker ranks (a scheduler's rank is 0).
    `subscribe`: send finished messages here. `expect_workers` (scheduler): each
    outcome is kept until every worker rank has acknowledged it too. The parallel
    sizes go to the proxy; `tp_size` None means `world_size / pcp_size`.
    """

    protocol: int
    engine_id: Id
    session: Id
    role: Literal["scheduler", "worker"]
    rank: Rank = 0
    world_size: Size = 1
    subscribe: bool = True
    expect_workers: bool = False
    tp_size: Size | None = None
    pcp_size: Size = 1
    dcp_size: Size = 1
    client: Annotated[str, msgspec.Meta(max_length=256)] = ""


class RegisterKv(Message, tag="register_kv"):
    """A worker offers its rank's KV memory. `side_channel_port`: the port wanted for world
    rank 0, None leaves the choice to the daemon. `token` comes back in the answer.
    """

    token: Token
    memory: KvMemory
    side_channel_port: Port | None = None


class UnregisterKv(Message, tag="unregister_kv"):
    """A worker takes its rank's KV memory back; answered when no writer is left."""

    token: Token


class Submission(msgspec.Struct, omit_defaults=True):
    """One request that waits for KV.

    `block_ids`: one list per KV group, the cached prefix included, in order.
    `cached_tokens`: tokens the engine already holds. `do_virtual` here or in
    `kv_transfer_params` marks a virtual request; absent or null is false.
    `timeout_s` shortens the daemon's request deadline.
    """

    request_id: Id
    external_id: Id
    block_ids: Annotated[BlockIds, msgspec.Meta(max_length=256)]
    prompt_tokens: Tokens
    cached_tokens: Tokens = 0
    attempt: Attempt = 1
    do_virtual: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    timeout_s: Seconds | None = None


class Submit(Message, tag="submit"):
    """A batch of requests."""

    requests: list[Submission]


class Cancellation(msgspec.Struct, omit_defaults=True):
    """`attempt` None: whichever attempt is in flight."""

    request_id: Id
    attempt: Attempt | None = None


class Cancel(Message, tag="cancel"):
    """The engine wants these requests' blocks back; each still ends with an outcome."""

    requests: list[Cancellation]


class Acknowledge(Message, tag="acknowledge"):
    """This client has every outcome of `log` up to and including `seq`."""

    log: str
    seq: Annotated[int, msgspec.Meta(ge=0)]


class Heartbeat(Message, tag="heartbeat"):
    """Sign of life, both ways. The daemon answers with the same `token`."""

    token: Token = 0


class StatusQuery(Message, tag="status"):
    """Ask what the daemon is doing; needs no hello. With `request_id`: that request's story
    too (`engine_id` None searches all engines). `limit`: requests listed at most.
    """

    token: Token = 0
    engine_id: Id | None = None
    request_id: Id | None = None
    limit: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 100


class Bye(Message, tag="bye"):
    """The client leaves for good: its registration and its requests are given up."""


# Daemon to client


class Welcome(Message, tag="welcome"):
    """Answer to hello. `boot`: random per daemon start. `log`: the report log this seat reads.

    `generation`: the seat's registration that is still in force, or None. A client
    sends a heartbeat every `heartbeat_s` and is given up after `timeout_s` of silence.
    """

    protocol: int
    version: str
    boot: str
    log: str
    heartbeat_s: float
    timeout_s: float
    generation: int | None = None


class KvRegistered(Message, tag="kv_registered"):
    """Answer to register_kv. `side_channel_port` is world rank 0's. `layout`: where the
    memory is (for `pool`: what the client is to map).
    """

    token: Token
    generation: int
    side_channel_host: str
    side_channel_port: int
    layout: KvLayout


class KvUnregistered(Message, tag="kv_unregistered"):
    """Answer to unregister_kv: nobody writes to that memory any more."""

    token: Token


OutcomeState = Literal["done", "failed", "cancelled", "expired"]


class OutcomeItem(msgspec.Struct, omit_defaults=True):
    """How one attempt ended. `reason` is for machines (docs/protocol.md lists them)."""

    request_id: str
    external_id: str
    attempt: int
    state: OutcomeState
    reason: str
    detail: str = ""
    elapsed_s: float = 0.0


class Finished(Message, tag="finished"):
    """Outcomes number `first`, `first + 1`, ... of report log `log`."""

    log: str
    first: int
    outcomes: list[OutcomeItem]


class Refusal(msgspec.Struct, omit_defaults=True):
    """A submit that was not accepted and will have no outcome."""

    request_id: str
    attempt: int
    reason: str
    detail: str = ""


class Refused(Message, tag="refused"):
    """Answer to those requests of a submit that were not accepted."""

    requests: list[Refusal]


class StatusReport(Message, tag="status_report"):
    """Answer to status: see docs/protocol.md for the keys."""

    token: Token
    status: dict[str, Any]


class Error(Message, tag="error"):
    """Something the client sent could not be taken. `about`: the kind of message it answers;
    `token`: that message's, if it had one.
    """

    code: str
    message: str
    about: str = ""
    token: Token | None = None


FromClient = (
    Hello
    | RegisterKv
    | UnregisterKv
    | Submit
    | Cancel
    | Acknowledge
    | Heartbeat
    | StatusQuery
    | Bye
)
FromDaemon = (
    Welcome | KvRegistered | KvUnregistered | Finished | Refused | Heartbeat | StatusReport | Error
)


class WireError(ValueError):
    """A frame that is not a message. `code` and the text are fit to be sent back."""

    def __init__(self, code: str, message: str, about: str = "", token: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.about = about
        self.token = token


_encoder = msgspec.msgpack.Encoder()
_from_client = msgspec.msgpack.Decoder(FromClient)
_from_daemon = msgspec.msgpack.Decoder(FromDaemon)
_KINDS_FROM_CLIENT = frozenset(str(kind.__struct_config__.tag) for kind in FromClient.__args__)
_KINDS_FROM_DAEMON = frozenset(str(kind.__struct_config__.tag) for kind in FromDaemon.__args__)


def encode(message: FromClient | FromDaemon) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_from_client(frame: bytes | memoryview) -> FromClient:
    """The message in a frame that a client sent. Raises WireError and nothing else."""
    try:
        return _from_client.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _explain(frame, error, _KINDS_FROM_CLIENT) from None


def decode_from_daemon(frame: bytes | memoryview) -> FromDaemon:
    """The message in a frame that the daemon sent. Raises WireError and nothing else."""
    try:
        return _from_daemon.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _explain(frame, error, _KINDS_FROM_DAEMON) from None


class _Envelope(msgspec.Struct):
    """What can be told of any message. The rest is skipped, not built: it may be large."""

    kind: str
    token: msgspec.Raw = msgspec.Raw(b"\xc0")


_envelope = msgspec.msgpack.Decoder(_Envelope)
_token = msgspec.msgpack.Decoder(Token)


def _explain(frame: bytes | memoryview, error: Exception, kinds: frozenset[str]) -> WireError:
    """Find out what a frame was meant to be, so that the answer helps its sender."""
    try:
        envelope = _envelope.decode(frame)
    except msgspec.ValidationError:
        return WireError("malformed", "a message is a map with a text under 'kind'")
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return WireError("malformed", "the frame is not msgpack")
    kind = envelope.kind[:64]
    if kind not in kinds:
        known = ", ".join(sorted(kinds))
        text = f"protocol version {PROTOCOL_VERSION} has no message '{kind}'; it has: {known}"
        return WireError("unknown_kind", text, kind)
    try:
        token = _token.decode(envelope.token)
    except (msgspec.MsgspecError, RecursionError):
        token = None
    return WireError("invalid", f"{kind}: {error}", kind, token)
