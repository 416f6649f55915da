"""KV memory that this process and the daemon both see: its own, torch's, or the daemon's pool.

Three ways to come by what `register_kv` takes:

- `SharedCaches.create(layout)`: memory made here, for caches that are yet to be built;
- `share_tensors(caches, groups)`: CPU tensors that exist already are moved to shared memory;
- `PoolMemory()`, and then `SharedCaches.attach(registration.layout)`: the daemon's pool.

torch is imported where tensors are handled, and only there.
"""

from __future__ import annotations

import math
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from decoded.kv.layout import LayoutError, PoolGroup, PoolLayer, check_layout, pool_layout
from decoded.kv.memory import KvRegion, attach_region, check_ascend
from decoded.kv.npu import NpuRegion, share_storage
from decoded.kv.regions import (
    SHARED_PREFIX,
    SHM,
    RegionError,
    SharedRegion,
    adopt_region,
    tensor_view,
    unlink_stale,
)
from decoded.wire.layout import (
    KvGroup,
    KvLayer,
    KvLayout,
    KvTensor,
    PoolMemory,
    Region,
    SharedMemory,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "PoolMemory",
    "SharedCaches",
    "give_up_shared",
    "plan_layout",
    "share_tensors",
    "tensor_layout",
    "tensor_storages",
]


def plan_layout(groups: Sequence[PoolGroup], layers: Sequence[PoolLayer]) -> KvLayout:
    """A layout for memory that is yet to be made: one region, tensors at page boundaries.

    The region's name is new, and says which process made it. As with any memory that
    deployed producers write to, leave block 0 of each group unused: they may scribble
    on its first bytes while they connect. Raises LayoutError.
    """
    return pool_layout(groups, layers, _new_name())


class SharedCaches:
    """A layout whose regions are mapped in this process.

    Close it after the registration has ended and the tensors made of it are gone.
    """

    def __init__(self, layout: KvLayout, regions: Sequence[KvRegion], owned: bool) -> None:
        """Use `create` or `attach`."""
        self.layout = layout
        self.regions = regions
        self._owned = owned
        self._layers = {layer.name: layer for layer in layout.layers}

    @classmethod
    def create(cls, layout: KvLayout) -> SharedCaches:
        """Make the layout's regions, filled with zeros. Raises LayoutError, RegionError."""
        check_layout(layout)
        return cls(layout, _open_all(layout, _create_region), owned=True)

    @classmethod
    def attach(cls, layout: KvLayout) -> SharedCaches:
        """Map regions that another process made, such as the daemon's pool: the `layout`
        of the Registration. On an NPU the thread uses that one from then on. Raises
        LayoutError, RegionError.

        A restarted daemon has a new pool; map that when `Client.registration` changes.
        """
        check_layout(layout)
        return cls(layout, _open_all(layout, attach_region), owned=False)

    @property
    def memory(self) -> SharedMemory:
        """What to register, for memory that was made here."""
        return SharedMemory(self.layout)

    def tensor(
        self,
        layer: str,
        index: int,
        dtype: torch.dtype | str,
        block_shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Tensor `index` of a layer, of shape (kernel blocks, *block_shape).

        `block_shape`: of one kernel block in elements; None is flat. Raises LayoutError
        for an unknown layer or index, or a shape that does not fill the block.
        """
        import torch

        found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(found, torch.dtype):
            raise LayoutError(f"torch has no dtype {dtype!r}")
        tensor = self._find(layer, index)
        blocks = self._group(layer).num_blocks * tensor.block_size_scale
        elements, rest = divmod(tensor.block_len, found.itemsize)
        shape = (elements,) if block_shape is None else tuple(block_shape)
        if rest or math.prod(shape) != elements:
            raise LayoutError(
                f"tensor {index} of layer {layer!r} has blocks of {tensor.block_len} bytes, which "
                f"{shape} elements of {found} do not fill"
            )
        region = self.regions[tensor.region]
        if isinstance(region, NpuRegion):
            return region.tensor(tensor.offset, (blocks, *shape), found)
        return tensor_view(region, tensor.offset, (blocks, *shape), found)

    def block(self, layer: str, index: int, block: int) -> memoryview:
        """The bytes of one block of the engine (all its kernel blocks), without torch.

        Raises LayoutError for a layer, index or block that is not there, RegionError on an NPU.
        """
        tensor, count = self._find(layer, index), self._group(layer).num_blocks
        if not 0 <= block < count:
            raise LayoutError(f"layer {layer!r} has blocks 0 to {count - 1}, not {block}")
        size = tensor.block_len * tensor.block_size_scale
        start = tensor.offset + block * size
        region = self.regions[tensor.region]
        if isinstance(region, NpuRegion):
            raise RegionError(
                f"memory {region.name} is an NPU's: `tensor` shows it, `block` cannot"
            )
        return region.buffer[start : start + size]

    def close(self) -> None:
        """Unmap; memory that was made here loses its name. Raises RegionError while tensors
        or memoryviews of it exist.
        """
        for region in self.regions:
            if self._owned and not region.closed:
                region.unlink()
            region.close()

    def __enter__(self) -> SharedCaches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _group(self, layer: str) -> KvGroup:
        return self.layout.groups[self._layers[layer].group]

    def _find(self, layer: str, index: int) -> KvTensor:
        found = self._layers.get(layer)
        if found is None:
            raise LayoutError(
                f"there is no layer {layer!r}; the first is {next(iter(self._layers))!r}"
            )
        if not 0 <= index < len(found.tensors):
            raise LayoutError(
                f"layer {layer!r} has {len(found.tensors)} tensors, no number {index}"
            )
        return found.tensors[index]


def share_tensors(
    caches: Mapping[str, Sequence[torch.Tensor]],
    groups: Sequence[KvGroup],
    group_of: Mapping[str, int] | None = None,
) -> SharedMemory:
    """Share existing caches with the daemon, and describe them for `register_kv`.

    Arguments as in `tensor_layout`. On an NPU they stay where they are, as torch_npu shares them.
    On CPU they are moved to shared memory: they stay usable, but their bytes move, so take
    addresses afterwards. The memory lives as long as the tensors. What a killed process
    leaves is removed by the daemon, or by the next process that shares tensors.
    torch.multiprocessing cannot send them any more. Raises LayoutError, RegionError.
    """
    for name, tensors in caches.items():
        for tensor in tensors:
            if tensor.device.type not in ("cpu", "npu"):
                raise RegionError(
                    f"layer {name!r} is on {tensor.device}: only CPU and NPU memory can be shared; "
                    "use decoded.client.transfer, where the worker runs Mooncake itself"
                )
    # Fail on a wrong layout before anything is moved.
    layout = tensor_layout(caches, groups, group_of)
    if any(tensor.device.type == "npu" for tensors in caches.values() for tensor in tensors):
        check_ascend(layout, [address for address, _ in tensor_storages(caches)])
    unlink_stale(SHARED_PREFIX)
    return SharedMemory(tensor_layout(caches, groups, group_of, _share_storage))


def give_up_shared(memory: SharedMemory) -> None:
    """Remove the names of what `share_tensors` has shared: for a process that is about to end,
    perhaps not by itself. Who has mapped the memory keeps it, and so do the tensors. They
    cannot be shared again.
    """
    for region in memory.layout.regions:
        remove = _removers.get(region.name)
        if remove is not None:
            remove()


def tensor_layout(
    caches: Mapping[str, Sequence[torch.Tensor]],
    groups: Sequence[KvGroup],
    group_of: Mapping[str, int] | None = None,
    place: Callable[[torch.UntypedStorage, int], tuple[Region, int]] | None = None,
) -> KvLayout:
    """Describe caches that exist: one region per torch storage.

    `caches`: per layer, in the order in which a forward pass fills them, its tensors
    (K and V, or MLA parts), each of shape (kernel blocks, ...) with each kernel block
    in one piece. K and V stacked in one tensor are two: `(kv[0], kv[1])`. `groups`:
    the KV groups; `group_of`: each layer's, 0 if it is not named. The kernel block
    scale follows from the group's number of blocks. `place`: names the region of the
    n-th storage, and says where in it the storage begins. Raises LayoutError.
    """
    storages = {key: index for index, key in enumerate(_storages(caches))}
    regions: list[Region] = []
    begins: list[int] = []
    for index, storage in enumerate(_storages(caches).values()):
        region, begin = (place or _label)(storage, index)
        regions.append(region)
        begins.append(begin)
    layers: list[KvLayer] = []
    for name, tensors in caches.items():
        group = (group_of or {}).get(name, 0)
        if not 0 <= group < len(groups):
            raise LayoutError(
                f"layer {name!r} is in KV group {group}, but there are {len(groups)} groups"
            )
        described: list[KvTensor] = []
        for number, tensor in enumerate(tensors):
            what = f"tensor {number} of layer {name!r}"
            region_index = storages[_key(tensor)]
            offset = begins[region_index] + int(tensor.storage_offset()) * tensor.element_size()
            block_len, scale = _blocks(tensor, groups[group].num_blocks, what)
            described.append(KvTensor(region_index, offset, block_len, scale))
        layers.append(KvLayer(name, group, described))
    layout = KvLayout(regions, list(groups), layers)
    check_layout(layout)
    return layout


def tensor_storages(caches: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[tuple[int, int]]:
    """Address and size in bytes of each region of `tensor_layout(caches, ...)`, in order."""
    for storage in _storages(caches).values():
        yield storage.data_ptr(), storage.nbytes()


def _storages(caches: Mapping[str, Sequence[torch.Tensor]]) -> dict[int, torch.UntypedStorage]:
    """The distinct storages, in order of first use."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensors in caches.values():
        for tensor in tensors:
            found.setdefault(_key(tensor), tensor.untyped_storage())
    return found


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _blocks(tensor: torch.Tensor, num_blocks: int, what: str) -> tuple[int, int]:
    """Bytes of one kernel block, and kernel blocks per block of the engine."""
    if tensor.dim() < 1 or tensor.numel() == 0:
        raise LayoutError(f"{what} has shape {tuple(tensor.shape)}: the first extent is its blocks")
    kernel_blocks = tensor.shape[0]
    scale, rest = divmod(kernel_blocks, num_blocks)
    if rest or not scale:
        raise LayoutError(
            f"{what} has {kernel_blocks} kernel blocks, which is no multiple of its KV group's "
            f"{num_blocks} blocks"
        )
    block = tensor[0]
    apart = kernel_blocks > 1 and tensor.stride(0) != block.numel()
    if apart or not block.is_contiguous():
        raise LayoutError(
            f"{what} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its blocks do "
            "not lie in one piece, one after the other"
        )
    return block.numel() * tensor.element_size(), scale


def _label(storage: torch.UntypedStorage, index: int) -> tuple[Region, int]:
    return Region(f"storage-{index}", storage.nbytes()), 0


def _share_storage(storage: torch.UntypedStorage, index: int) -> tuple[Region, int]:
    if storage.device.type == "npu":
        label = f"npu:{storage.device.index}/storage-{index}"
        return Region(label, storage.nbytes(), share_storage(storage)), 0
    return _move_storage(storage, index)


def _move_storage(storage: torch.UntypedStorage, index: int) -> tuple[Region, int]:
    """Move a storage to a file of its own in /dev/shm. torch puts a reference count before
    the bytes (`RefcountedMapAllocator`, 64 bytes in torch 2.13), so they begin later.

    torch has a process beside this one remove the file when this one dies. Where both are
    killed at once, as a service or a container is, gigabytes would stay: hence our name.
    """
    try:
        _, handle, size = storage._share_filename_cpu_()
    except RuntimeError as error:
        raise RegionError(f"torch cannot share storage {index}: {error}") from error
    name = _named.get(handle)
    if name is None:
        name = _named[handle] = _new_name()
        _removers[name] = weakref.finalize(storage, adopt_region(handle.decode(), name))
        weakref.finalize(storage, _named.pop, handle)
        weakref.finalize(storage, _removers.pop, name)
    try:
        total = (SHM / name[1:]).stat().st_size
    except FileNotFoundError:
        raise RegionError(
            f"storage {index} was shared as {name} and given up: share newly allocated tensors"
        ) from None
    return Region(name, total), total - size


_named: dict[bytes, str] = {}
"""Our names of the storages that are shared already, by torch's."""
_removers: dict[str, Callable[[], object]] = {}
"""What removes each of our names; once."""


def _new_name() -> str:
    """Says which process made it."""
    return f"{SHARED_PREFIX}client-{os.getpid()}-{secrets.token_hex(4)}"


def _create_region(region: Region) -> SharedRegion:
    return SharedRegion.create(region.name, region.size)


def _open_all(layout: KvLayout, open_one: Callable[[Region], KvRegion]) -> list[KvRegion]:
    """All regions, or none."""
    regions: list[KvRegion] = []
    try:
        for region in layout.regions:
            regions.append(open_one(region))
    except BaseException:
        for opened in regions:
            if open_one == _create_region:
                opened.unlink()
            opened.close()
        raise
    return regions
