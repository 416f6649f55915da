"""Memory on Ascend NPUs, shared between processes by torch_npu (tried with 2.13).

A device belongs to the thread that has set it: each function that touches one sets it
first, so that a thread that serves one rank never touches another's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from decoded.wire.layout import NpuHandle, Region

from .errors import RegionError

if TYPE_CHECKING:
    import torch

ALIGNMENT = 2 << 20
"""Mooncake's `ascend` protocol wants registered memory to begin at a multiple of this."""
MAX_REGIONS = 256
"""So many ranges one Mooncake engine registers with `ascend`."""

_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


class NpuRegion:
    """One storage on an NPU. `address` is where this process's Mooncake finds it; a host
    access there faults. `begin`: the first aligned byte.

    `device` is the machine's number of the NPU, which ASCEND_RT_VISIBLE_DEVICES names.
    """

    def __init__(self, name: str, storage: torch.UntypedStorage) -> None:
        self.name = name
        self.size = storage.nbytes()
        self.device = machine_number(int(storage.device.index or 0))
        self.address = int(storage.data_ptr())
        self.begin = -self.address % ALIGNMENT
        self._storage: torch.UntypedStorage | None = storage

    @classmethod
    def create(cls, name: str, size: int, device: int) -> NpuRegion:
        """Allocate `size` bytes, all zero, from the aligned byte `begin` on. Raises RegionError."""
        index = use_device(device)
        return cls(name, _allocate(name, size, device, index))

    @classmethod
    def attach(cls, region: Region) -> NpuRegion:
        """Map what another process shares. Raises RegionError."""
        handle = region.npu
        assert handle is not None, "a region of an NPU has a handle"
        index = use_device(handle.device)
        return cls(region.name, _map(region, handle, index))

    @property
    def storage(self) -> torch.UntypedStorage:
        """The memory. Raises RegionError once closed."""
        if self._storage is None:
            raise RegionError(f"memory {self.name} is closed")
        return self._storage

    @property
    def closed(self) -> bool:
        return self._storage is None

    def share(self) -> Region:
        """The region with a handle for one process, which may map it once."""
        use_device(self.device)
        return Region(self.name, self.size, share_storage(self.storage))

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor over the region's bytes from `offset` on. Raises RegionError."""
        import torch

        count = 1
        for extent in shape:
            count *= extent
        end = offset + count * dtype.itemsize
        if offset < 0 or end > self.size or offset % dtype.itemsize:
            raise RegionError(
                f"bytes {offset} to {end} of {self.name}, which has {self.size}, make no tensor of "
                f"{dtype}"
            )
        use_device(self.device)
        device = self.storage.device
        flat = torch.empty(0, dtype=dtype, device=device)
        return flat.set_(self.storage, offset // dtype.itemsize, (count,), (1,)).view(*shape)

    def close(self) -> None:
        """Let go of it here; freed when no tensor and no process has it. Again is harmless."""
        if self._storage is not None:
            use_device(self.device)
            self._storage = None

    def unlink(self) -> bool:
        """It has no name that could be removed: the driver frees it with its last process."""
        return False


# These two are functions of their own on purpose. What torch_npu's first import leaves behind keeps
# alive the frames that it was called from, and with them their local variables.


def _allocate(name: str, size: int, device: int, index: int) -> torch.UntypedStorage:
    import torch

    try:
        # The allocator aligns to less than Mooncake wants.
        whole = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=f"npu:{index}")
        _torch_npu().synchronize()
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        raise RegionError(
            f"{size} bytes for {name} cannot be had on NPU {device}: {_first_line(error)}; "
            "make the KV memory smaller, or see with npu-smi who else uses the NPU"
        ) from error
    return whole.untyped_storage()


def _map(region: Region, handle: NpuHandle, index: int) -> torch.UntypedStorage:
    import torch

    try:
        storage: torch.UntypedStorage = torch.UntypedStorage._new_shared_npu(  # type: ignore[attr-defined]
            index,
            handle.handle,
            handle.size,
            handle.offset,
            handle.ref_counter,
            handle.ref_counter_offset,
            handle.event,
            handle.event_sync,
        )
    except RuntimeError as error:
        raise RegionError(
            f"memory {region.name} on NPU {handle.device} cannot be mapped: "
            f"{_first_line(error)}; is the process that shares it still there?"
        ) from error
    if storage.nbytes() < region.size:
        raise RegionError(
            f"memory {region.name} has {storage.nbytes()} bytes, {region.size} are needed: "
            "does the layout that names it belong to another run?"
        )
    return storage


def share_storage(storage: torch.UntypedStorage) -> NpuHandle:
    """What another process needs to map a storage. Raises RegionError."""
    try:
        shared: Any = storage._share_npu_()  # type: ignore[attr-defined]
    except RuntimeError as error:
        raise RegionError(f"torch_npu cannot share the memory: {_first_line(error)}") from error
    device, handle, size, offset, ref_counter, ref_counter_offset, event, event_sync = shared
    return NpuHandle(
        machine_number(int(device)),
        handle,
        size,
        offset,
        ref_counter,
        ref_counter_offset,
        event,
        event_sync,
    )


def use_device(number: int) -> int:
    """Have this thread use an NPU; `number` is the machine's, the result is this process's.

    Raises RegionError if torch_npu is missing, or this process does not see the NPU.
    """
    index = local_index(number)
    npu = _torch_npu()
    count = npu.device_count()
    if index >= count:
        raise RegionError(
            f"there is no NPU {number}: this process sees {count}; {_VISIBLE} is "
            f"{os.environ.get(_VISIBLE, 'not set')}"
        )
    npu.set_device(index)
    return index


def machine_number(index: int, environ: Mapping[str, str] = os.environ) -> int:
    """The machine's number of the `index`-th NPU that this process sees."""
    visible = _visible(environ)
    return index if visible is None else visible[index]


def local_index(number: int, environ: Mapping[str, str] = os.environ) -> int:
    """The other way around. Raises RegionError if this process does not see it."""
    visible = _visible(environ)
    if visible is None:
        return number
    if number not in visible:
        raise RegionError(
            f"NPU {number} is not among those that this process sees: "
            f"{_VISIBLE}={environ[_VISIBLE]}"
        )
    return visible.index(number)


def _visible(environ: Mapping[str, str]) -> list[int] | None:
    text = environ.get(_VISIBLE, "")
    if not text.strip():
        return None
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise RegionError(f"{_VISIBLE}={text}: give numbers, separated by commas") from None


def _torch_npu() -> Any:
    try:
        import torch_npu
    except (ImportError, OSError) as error:
        raise RegionError(
            f"torch_npu cannot be imported ({_first_line(error)}): install the torch-npu that goes "
            "with this torch, and load CANN's environment (source .../ascend-toolkit/set_env.sh)"
        ) from error
    return torch_npu.npu


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
