"""The demo's paged cache in an NPU's memory. Computing stays the host's: no operator is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_npu

from decoded.kv.layout import block_offset, block_size
from decoded.kv.npu import NpuRegion
from decoded.wire.layout import KvLayout

from .cache import PagedCache
from .shape import SHAPE, Shape

npu: Any = torch_npu.npu


class NpuCache(PagedCache):
    """Blocks are fetched from the device before they are read, and stored after they were written.

    Of one thread, which uses the region's NPU from then on. `layout`: where in `region` it is.
    """

    def __init__(self, layout: KvLayout, region: NpuRegion, shape: Shape = SHAPE) -> None:
        memory = bytearray(region.size)
        self._host = torch.frombuffer(memory, dtype=torch.uint8)
        self._device: torch.Tensor | None = region.tensor(0, (region.size,), torch.uint8)
        super().__init__(layout, memoryview(memory), shape)

    def write(
        self,
        layer: int,
        blocks: Sequence[int],
        first: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        self._fetch([layer], blocks)
        super().write(layer, blocks, first, keys, values)
        self._store([layer], blocks)

    def read(
        self, layer: int, blocks: Sequence[int], count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._fetch([layer], blocks)
        return super().read(layer, blocks, count)

    def fill(self, seed: int) -> None:
        super().fill(seed)
        self._store(range(len(self.layout.layers)), range(self.num_blocks))
        npu.synchronize()

    def written(self) -> Callable[[], None]:
        """What waits, in any thread, until all that was written so far is in memory."""
        event = npu.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def close(self) -> None:
        self._device = None
        super().close()

    def _pieces(self, blocks: Sequence[int]) -> Iterator[memoryview]:
        self._fetch(range(len(self.layout.layers)), blocks)
        yield from super()._pieces(blocks)

    def _fetch(self, layers: Sequence[int], blocks: Sequence[int]) -> None:
        assert self._device is not None, "the cache is closed"
        for begin, end in self._ranges(layers, blocks):
            self._host[begin:end].copy_(self._device[begin:end])

    def _store(self, layers: Sequence[int], blocks: Sequence[int]) -> None:
        """On the device's stream, as an operator would: done when that has come so far."""
        assert self._device is not None, "the cache is closed"
        for begin, end in self._ranges(layers, blocks):
            self._device[begin:end].copy_(self._host[begin:end].to(self._device.device))

    def _ranges(self, layers: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Bytes of the region, neighbouring blocks in one piece."""
        for layer in layers:
            for tensor in self.layout.layers[layer].tensors:
                size = block_size(tensor)
                for run in _runs(sorted(blocks)):
                    yield block_offset(tensor, run.start), block_offset(tensor, run.stop - 1) + size


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Rising numbers as ranges without gaps."""
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield range(numbers[start], numbers[index - 1] + 1)
            start = index
