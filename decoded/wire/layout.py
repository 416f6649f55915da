"""How an engine's KV memory is described on the wire: regions, KV groups, layers, tensors.

Byte offsets are relative to a region, so that each process can map the region
wherever it likes. What the numbers mean for addresses is in `decoded.kv.layout`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=2**48)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Address = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
Handle = Annotated[bytes, msgspec.Meta(max_length=1024)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class NpuHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How another process maps a storage on an Ascend NPU, once: what torch_npu's
    `UntypedStorage._share_npu_` returns, in its order. `device` is the machine's number of the NPU.
    """

    device: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    handle: Handle
    size: Count
    offset: Offset
    ref_counter: Handle
    ref_counter_offset: Offset
    event: Handle
    event_sync: bool


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One contiguous piece of memory of `size` bytes. `name`: its POSIX shared memory
    object (with the leading slash), or any label where memory is not shared by name.
    `npu`: where it is an NPU's and shared, how to map it.
    """

    name: Name
    size: Count
    npu: NpuHandle | None = None


class KvTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of a layer (K, V, or an MLA part).

    `block_len`: bytes of one kernel block (element size times the product of the
    block's shape). `block_size_scale`: kernel blocks per block of the engine.
    Block `b` is the kernel blocks `b * scale` .. `b * scale + scale - 1`, kernel
    block `k` starts at `offset + k * block_len` in region `region`.
    """

    region: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    offset: Offset
    block_len: Count
    block_size_scale: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1


class KvLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's cache. `group`: index of its KV group."""

    name: Name
    group: Annotated[int, msgspec.Meta(ge=0, le=255)]
    tensors: Annotated[list[KvTensor], msgspec.Meta(min_length=1, max_length=16)]


class KvGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One KV group: layers that share block ids. `block_size`: tokens per block."""

    block_size: Count
    num_blocks: Count


class KvLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's KV memory. Layers are in the order in which a forward pass fills them."""

    regions: Annotated[list[Region], msgspec.Meta(min_length=1, max_length=4096)]
    groups: Annotated[list[KvGroup], msgspec.Meta(min_length=1, max_length=256)]
    layers: Annotated[list[KvLayer], msgspec.Meta(min_length=1, max_length=1024)]


class SharedMemory(msgspec.Struct, frozen=True, tag_field="source", tag="shared"):
    """The engine owns the memory; its regions are POSIX shared memory objects that the
    daemon maps and registers with the rank's Mooncake engine.
    """

    layout: KvLayout


class PoolMemory(msgspec.Struct, frozen=True, tag_field="source", tag="pool"):
    """The daemon owns the memory (kv.pool in its configuration); the client maps it."""


class TransferMemory(msgspec.Struct, frozen=True, tag_field="source", tag="transfer"):
    """The worker runs the Mooncake engine itself; the daemon only advertises it.

    `te_rpc_port`: that engine's port on the advertised host. `region_addrs`: the
    address of each region of the layout in the worker's address space.
    """

    layout: KvLayout
    te_rpc_port: Port
    region_addrs: Annotated[list[Address], msgspec.Meta(min_length=1, max_length=4096)]


KvMemory = SharedMemory | PoolMemory | TransferMemory
Source = Literal["shared", "pool", "transfer"]
