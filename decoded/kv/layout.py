"""What a layout means: which bytes hold which block, and what a request has to fetch.

Kernel block `k` of a tensor is the `block_len` bytes from `base + k * block_len`, and
block `b` of the engine is the kernel blocks `b * scale` .. `b * scale + scale - 1`:
`b` begins at `base + b * scale * block_len`. `base` is the address of the tensor's
region plus the tensor's offset.

A prompt of `n` tokens lies in the first `ceil(n / block_size)` entries of a group's
block list. P begins to send at entry `floor(cached_tokens / block_size)`, so a
block that D holds in part is written again in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region
from decoded.wire.side_channel import LayerMetadata

PAGE = 4096


class LayoutError(ValueError):
    """A layout that describes no usable memory; the text names the layer, tensor or region."""


def check_layout(layout: KvLayout) -> None:
    """Raise LayoutError unless every tensor lies in a region and no two collide.

    Layers of one KV group must not share bytes. Layers of different groups may:
    hybrid engines put them over the same memory and give the groups disjoint blocks.
    """
    names: set[str] = set()
    for layer in layout.layers:
        if layer.name in names:
            raise LayoutError(f"two layers are named {layer.name!r}")
        names.add(layer.name)
        if layer.group >= len(layout.groups):
            raise LayoutError(
                f"layer {layer.name!r} is in KV group {layer.group}, "
                f"but there are {len(layout.groups)} groups"
            )
        for index, tensor in enumerate(layer.tensors):
            _check_tensor(layout, layer, index, tensor)
    _check_disjoint(layout)


def _check_tensor(layout: KvLayout, layer: KvLayer, index: int, tensor: KvTensor) -> None:
    what = f"tensor {index} of layer {layer.name!r}"
    if tensor.region >= len(layout.regions):
        raise LayoutError(
            f"{what} is in region {tensor.region}, but there are {len(layout.regions)} regions"
        )
    region = layout.regions[tensor.region]
    size = tensor_size(layout.groups[layer.group], tensor)
    if tensor.offset + size > region.size:
        raise LayoutError(
            f"{what} ends at byte {tensor.offset + size} (offset {tensor.offset}, "
            f"{layout.groups[layer.group].num_blocks} blocks of {block_size(tensor)} bytes), but "
            f"region {region.name!r} has {region.size}"
        )


def _check_disjoint(layout: KvLayout) -> None:
    spans = sorted(
        (layer.group, tensor.region, tensor.offset, layer.name, index, tensor)
        for layer in layout.layers
        for index, tensor in enumerate(layer.tensors)
    )
    for before, after in pairwise(spans):
        group, region, start, name, index, tensor = before
        same_memory = (group, region) == after[:2]
        if same_memory and start + tensor_size(layout.groups[group], tensor) > after[2]:
            raise LayoutError(
                f"tensor {index} of layer {name!r} and tensor {after[4]} of layer {after[3]!r} "
                f"overlap in region {layout.regions[region].name!r}"
            )


def block_size(tensor: KvTensor) -> int:
    """Bytes of one block of the engine in `tensor`."""
    return tensor.block_size_scale * tensor.block_len


def tensor_size(group: KvGroup, tensor: KvTensor) -> int:
    """Bytes from the tensor's first block to the end of its last."""
    return group.num_blocks * block_size(tensor)


def spans(layout: KvLayout) -> list[tuple[int, int]]:
    """Per region: where its first tensor begins, and bytes from there to its last one's end.

    A region without a tensor is (0, its size).
    """
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for layer in layout.layers:
        for tensor in layer.tensors:
            end = tensor.offset + tensor_size(layout.groups[layer.group], tensor)
            begins[tensor.region] = min(begins.get(tensor.region, end), tensor.offset)
            ends[tensor.region] = max(ends.get(tensor.region, 0), end)
    return [
        (begins.get(index, 0), ends.get(index, region.size) - begins.get(index, 0))
        for index, region in enumerate(layout.regions)
    ]


def moved(layout: KvLayout, regions: Sequence[Region], by: Sequence[int]) -> KvLayout:
    """The layout in other regions, its tensors `by` so many bytes further on in each."""
    layers = [
        msgspec.structs.replace(
            layer,
            tensors=[
                msgspec.structs.replace(tensor, offset=tensor.offset + by[tensor.region])
                for tensor in layer.tensors
            ],
        )
        for layer in layout.layers
    ]
    return msgspec.structs.replace(layout, regions=list(regions), layers=layers)


def block_offset(tensor: KvTensor, block: int) -> int:
    """Where `block` of the engine begins in the tensor's region, in bytes."""
    return tensor.offset + block * block_size(tensor)


def check_blocks(
    layout: KvLayout, blocks: Sequence[Sequence[int]], prompt_tokens: int
) -> str | None:
    """What is wrong with a request's block lists, or None.

    `blocks`: one list per KV group, the cached prefix included. Block 0 may occur, and
    more than once: sliding window groups put it where the window has passed. All
    lists empty is fine too (there is nothing to fetch); some of them empty is not,
    because P stays silent when the last layer's group has nothing to send.
    """
    if len(blocks) != len(layout.groups):
        return f"{len(blocks)} block lists, but the layout has {len(layout.groups)} KV groups"
    if not any(blocks):
        return None
    for index, (group, ids) in enumerate(zip(layout.groups, blocks, strict=True)):
        needed = _blocks_of(prompt_tokens, group.block_size)
        if len(ids) < needed:
            return (
                f"KV group {index} has {len(ids)} blocks, but {prompt_tokens} prompt tokens need "
                f"{needed} of {group.block_size} tokens"
            )
        if not ids:
            continue
        low, high = min(ids), max(ids)
        if low < 0 or high >= group.num_blocks:
            wrong = low if low < 0 else high
            return f"KV group {index} has no block {wrong}: it has {group.num_blocks} blocks"
        if len(set(ids)) != len(ids) and (twice := _repeated(ids)):
            return f"block {twice} is twice in the list of KV group {index}"
    return None


def _repeated(ids: Sequence[int]) -> int:
    """The first block other than 0 that comes a second time, or 0."""
    seen: set[int] = set()
    for block in ids:
        if block and block in seen:
            return block
        seen.add(block)
    return 0


def fetch_start(cached_tokens: int, block_size: int) -> int:
    """Index, in a group's block list, of the first block that P will send."""
    return cached_tokens // block_size


def fetch_stop(prompt_tokens: int, cached_tokens: int, block_size: int) -> int:
    """Index after the last block that P will send; `fetch_start` when there is none."""
    if cached_tokens >= prompt_tokens:
        return fetch_start(cached_tokens, block_size)
    return _blocks_of(prompt_tokens, block_size)


def nothing_to_fetch(
    layout: KvLayout, prompt_tokens: int, cached_tokens: int, blocks: Sequence[Sequence[int]]
) -> bool:
    """Whether a request is complete without P: D holds every token, or there are no blocks.

    While a token is missing every group has a block to fetch, so P will speak. Once
    none is missing some groups may still begin and end inside a block, which P would
    send again; D does not need it.
    """
    return not any(blocks) or all(
        fetch_start(cached_tokens, group.block_size)
        >= fetch_stop(prompt_tokens, cached_tokens, group.block_size)
        for group in layout.groups
    )


def fetch_bytes(layout: KvLayout, prompt_tokens: int, cached_tokens: int) -> int:
    """Bytes that P writes to this rank for a request, all layers together."""
    blocks = [
        fetch_stop(prompt_tokens, cached_tokens, group.block_size)
        - fetch_start(cached_tokens, group.block_size)
        for group in layout.groups
    ]
    return sum(
        blocks[layer.group] * block_size(tensor)
        for layer in layout.layers
        for tensor in layer.tensors
    )


def layer_metadata(layout: KvLayout, region_addrs: Sequence[int]) -> dict[str, LayerMetadata]:
    """The layers of a GET_META answer, in the layout's order.

    `region_addrs`: each region's address in the process that registers it with Mooncake.
    """
    if len(region_addrs) != len(layout.regions):
        raise LayoutError(f"{len(region_addrs)} region addresses for {len(layout.regions)} regions")
    return {
        layer.name: LayerMetadata(
            tensor_group_idx=[layer.group] * len(layer.tensors),
            kv_caches_base_addr=[region_addrs[each.region] + each.offset for each in layer.tensors],
            block_len=[each.block_len for each in layer.tensors],
            block_size_scale=[each.block_size_scale for each in layer.tensors],
        )
        for layer in layout.layers
    }


class PoolGroup(Protocol):
    """A KV group of the daemon's own pool, as configured."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class PoolTensor(Protocol):
    """A tensor of a layer of the pool, as configured."""

    @property
    def block_len(self) -> int: ...
    @property
    def block_size_scale(self) -> int: ...


class PoolLayer(Protocol):
    """A layer of the pool, as configured."""

    @property
    def name(self) -> str: ...
    @property
    def group(self) -> int: ...
    @property
    def tensors(self) -> Sequence[PoolTensor]: ...


def pool_layout(
    groups: Sequence[PoolGroup], layers: Sequence[PoolLayer], region_name: str
) -> KvLayout:
    """One rank's layout of the daemon's own pool: one region, tensors at page boundaries.

    Block 0 of each group is reserved. P ranks of a larger tensor parallel size write
    128 bytes at the first layer's base address while they connect, so an
    engine on this pool must never give block 0 to a request; it may stand for "no
    block". Raises LayoutError when a layer names a group that is not there.
    """
    placed: list[KvLayer] = []
    end = 0
    for layer in layers:
        if layer.group >= len(groups):
            raise LayoutError(
                f"layer {layer.name!r} is in KV group {layer.group}, "
                f"but there are {len(groups)} groups"
            )
        tensors: list[KvTensor] = []
        for tensor in layer.tensors:
            tensors.append(KvTensor(0, end, tensor.block_len, tensor.block_size_scale))
            size = groups[layer.group].num_blocks * block_size(tensors[-1])
            end = _round_up(end + size)
        placed.append(KvLayer(layer.name, layer.group, tensors))
    layout = KvLayout(
        regions=[Region(region_name, end)],
        groups=[KvGroup(each.block_size, each.num_blocks) for each in groups],
        layers=placed,
    )
    check_layout(layout)
    return layout


def _blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE
