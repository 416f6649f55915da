"""What D tells P about a request: the JSON that D posts to the metaserver."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .errors import ParamsError

Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Size = Annotated[int, msgspec.Meta(ge=1, le=65536)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
BlockIds = Annotated[list[list[BlockId]], msgspec.Meta(max_length=256)]
BlockSizes = Annotated[
    list[Annotated[int, msgspec.Meta(ge=1, le=2**40)]], msgspec.Meta(min_length=1, max_length=256)
]


class RemoteParams(msgspec.Struct, frozen=True):
    """Where a request's KV is to go. Keys that are not listed here are ignored.

    `request_id`: the external id. `remote_block_ids`: one list per KV group, the cached
    prefix included. `remote_block_size`: tokens per block, per KV group. `remote_port`:
    side channel of D's world rank 0. `remote_cached_tokens`: tokens that D already holds.
    """

    request_id: Id
    remote_block_ids: BlockIds
    remote_block_size: BlockSizes
    remote_engine_id: Id
    remote_host: Host
    remote_port: Port
    remote_tp_size: Size
    remote_cached_tokens: Tokens
    remote_pcp_size: Size = 1
    remote_dcp_size: Size = 1
    token_ids: list[int] = []
    do_remote_prefill: bool = False
    do_remote_decode: bool = True
    do_virtual: bool | None = None


class RemoteAddress(msgspec.Struct, frozen=True):
    """Who waits for a request's KV: of `RemoteParams`, what it takes to tell it FAILED."""

    request_id: Id
    remote_host: Host
    remote_port: Port
    remote_tp_size: Size = 1

    @classmethod
    def of(cls, params: RemoteParams) -> RemoteAddress:
        return cls(params.request_id, params.remote_host, params.remote_port, params.remote_tp_size)


_decoder = msgspec.json.Decoder(RemoteParams)


def decode_params(body: bytes) -> RemoteParams:
    """The parameters in the body of D's POST. Raises ParamsError and nothing else."""
    try:
        params = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ParamsError(str(error)) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise ParamsError(f"the body is not JSON: {error}") from None
    if params.do_virtual:
        raise ParamsError("do_virtual is true: a virtual request has no prefill")
    if not params.do_remote_decode or params.do_remote_prefill:
        raise ParamsError(
            "a prefill is asked for by do_remote_decode true, do_remote_prefill false"
        )
    groups, sizes = len(params.remote_block_ids), len(params.remote_block_size)
    if groups not in (0, sizes):
        raise ParamsError(f"remote_block_ids has {groups} KV groups, remote_block_size has {sizes}")
    return params


def read_address(params: object) -> RemoteAddress | None:
    """Who waits, of parameters that `decode_params` refuses; None if not even that is there."""
    try:
        return msgspec.convert(params, RemoteAddress)
    except msgspec.ValidationError:
        return None
