"""KV memory for tests: layouts, regions with known bytes, and the copy that a push should be."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import uuid4

from decoded.kv.regions import SharedRegion
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region

UNTOUCHED = 0xEE


def make_layout(
    groups: Sequence[KvGroup],
    layer_groups: Sequence[int],
    block_lens: Sequence[int],
    scale: int = 1,
) -> KvLayout:
    """One region; layer `i` is in KV group `layer_groups[i]`, a tensor per block length."""
    layers, end = [], 0
    for index, group in enumerate(layer_groups):
        tensors = []
        for block_len in block_lens:
            tensors.append(KvTensor(0, end, block_len, scale))
            end += block_len * scale * groups[group].num_blocks
        layers.append(KvLayer(f"model.layers.{index}.self_attn.attn", group, tensors))
    return KvLayout([Region("kv", end)], list(groups), layers)


@contextmanager
def region_for(layout: KvLayout, seed: int | None = None) -> Iterator[SharedRegion]:
    """A region as large as the layout's: random bytes by `seed`, or all UNTOUCHED."""
    size = layout.regions[0].size
    region = SharedRegion.create(f"/decoded-test-{os.getpid()}-{uuid4().hex[:8]}", size)
    try:
        region.buffer[:] = (
            bytes([UNTOUCHED]) * size if seed is None else random.Random(seed).randbytes(size)
        )
        yield region
    finally:
        region.unlink()
        region.close()


def copied(
    local: KvLayout,
    source: bytes,
    remote: KvLayout,
    target: bytes,
    local_blocks: Sequence[Sequence[int]],
    remote_blocks: Sequence[Sequence[int]],
    starts: Sequence[int],
    part: int = 0,
) -> bytes:
    """`target` after a push, block by block: of each group, P's blocks from `starts` on.

    For equal block sizes and scales on both sides; `part`: which part of D's block P holds.
    """
    result = bytearray(target)
    for ours, theirs in zip(local.layers, remote.layers, strict=True):
        pairs = list(zip(local_blocks[ours.group], remote_blocks[ours.group], strict=True))
        for mine, yours in pairs[starts[ours.group] :]:
            for a, b in zip(ours.tensors, theirs.tensors, strict=True):
                for j in range(a.block_size_scale):
                    src = a.offset + (mine * a.block_size_scale + j) * a.block_len
                    dst = b.offset + (yours * b.block_size_scale + j) * b.block_len
                    dst += part * a.block_len
                    result[dst : dst + a.block_len] = source[src : src + a.block_len]
    return bytes(result)
