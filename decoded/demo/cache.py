"""Paged KV memory as tensors: what prefill writes, attention reads and Mooncake moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch

from decoded.kv.layout import block_offset, block_size
from decoded.wire.layout import KvLayout

from .shape import BLOCK_SIZE, SHAPE, Shape


class PagedCache:
    """K and V of every layer, in blocks, over `memory` as `layout` describes it.

    `memory`: the bytes of the layout's only region, writable. Others may write to them too.
    """

    def __init__(self, layout: KvLayout, memory: memoryview, shape: Shape = SHAPE) -> None:
        self.layout = layout
        self.num_blocks = layout.groups[0].num_blocks
        self._memory = memory
        slots = self.num_blocks * BLOCK_SIZE
        per_slot = shape.kv_heads * shape.head_dim
        self._layers = [
            [
                torch.frombuffer(
                    memory, dtype=torch.float32, count=slots * per_slot, offset=tensor.offset
                ).view(slots, shape.kv_heads, shape.head_dim)
                for tensor in layer.tensors
            ]
            for layer in layout.layers
        ]

    def write(
        self,
        layer: int,
        blocks: Sequence[int],
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Put K and V, [tokens, kv_heads, head_dim], at positions `first`, `first + 1`, ..."""
        slots = _slots(blocks, first, first + keys.shape[0])
        for tensor, new in zip(self._layers[layer], (keys, values), strict=True):
            tensor.index_copy_(0, slots, new)

    def read(
        self, layer: int, blocks: Sequence[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V of the first `count` positions, [count, kv_heads, head_dim]."""
        slots = _slots(blocks, 0, count)
        keys, values = (tensor.index_select(0, slots) for tensor in self._layers[layer])
        return keys, values

    def fill(self, seed: int) -> None:
        """Noise everywhere, so that what was never written can be told from what was."""
        generator = torch.Generator().manual_seed(seed)
        for tensors in self._layers:
            for tensor in tensors:
                tensor.normal_(generator=generator)

    def written(self) -> Callable[[], None] | None:
        """What waits until all that was written so far is in memory; None: it is."""
        return None

    def dump(self, blocks: Sequence[int]) -> bytes:
        """The bytes of these blocks: by layer, then K and V, then by block."""
        return b"".join(self._pieces(blocks))

    def digest(self, blocks: Sequence[int]) -> str:
        """A checksum of these blocks' bytes in all layers."""
        checksum = hashlib.sha256()
        for piece in self._pieces(blocks):
            checksum.update(piece)
        return checksum.hexdigest()

    def close(self) -> None:
        """Let go of the memory, so that its owner can unmap it."""
        self._layers.clear()
        self._memory.release()

    def _pieces(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        for layer in self.layout.layers:
            for tensor in layer.tensors:
                size = block_size(tensor)
                for block in blocks:
                    begin = block_offset(tensor, block)
                    yield self._memory[begin : begin + size]


class BlockPool:
    """Which blocks are free. Block 0 stays out of it."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks))

    def take(self, count: int, scattered: bool = False) -> list[int]:
        """`count` free blocks: in a row, or no two of them side by side and in falling order."""
        picked = self.free[: 2 * count : 2][::-1] if scattered else self.free[:count]
        if len(picked) < count:
            raise RuntimeError(f"{count} blocks are wanted, {len(self.free)} are free")
        taken = set(picked)
        self.free = [block for block in self.free if block not in taken]
        return picked


def _slots(blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
    """Rows of a layer's tensors that hold positions `start` .. `stop - 1`."""
    positions = torch.arange(start, stop)
    starts = torch.tensor(blocks, dtype=torch.int64) * BLOCK_SIZE
    return starts[positions // BLOCK_SIZE] + positions % BLOCK_SIZE
