"""The third arrangement: the worker runs Mooncake itself, and the daemon only advertises it.

For memory that the daemon cannot map: devices, or containers without a common /dev/shm.

    with WorkerTransfer.of_tensors(caches, groups, host="10.0.0.7") as transfer:
        client.register_kv(transfer.memory)
        ...
        client.unregister_kv()

A daemon that restarts does not know whom its last life told where to write, and this engine
lived on. So such a registration ends with the life of the daemon that it was made with:
`Client.registration` is None then. Close the WorkerTransfer, make another, register that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from decoded.kv.layout import LayoutError, check_layout
from decoded.kv.memory import open_engine
from decoded.kv.npu import machine_number, use_device
from decoded.kv.transfer import TransferError
from decoded.wire.layout import KvGroup, KvLayout, TransferMemory

from .memory import tensor_layout, tensor_storages

if TYPE_CHECKING:
    import torch

__all__ = ["TransferError", "WorkerTransfer"]


class WorkerTransfer:
    """A Mooncake engine of this process that lets producers write to `layout`'s regions.

    Close it once the registration has ended, and before the memory goes: closing is
    what makes sure that nobody writes any more.
    """

    def __init__(
        self,
        layout: KvLayout,
        region_addrs: Sequence[int],
        host: str,
        protocol: str = "tcp",
        device: str = "",
    ) -> None:
        """Start the engine and register each region; blocks.

        `region_addrs`: where each region lies in this process. `host`: this node as
        producers reach it, the same as the daemon's side_channel.advertise_host.
        `protocol`, `device`: as in the daemon's configuration; with `ascend`, call it in
        a thread that has set the device. Raises LayoutError, TransferError.
        """
        check_layout(layout)
        if len(region_addrs) != len(layout.regions):
            raise LayoutError(
                f"{len(region_addrs)} region addresses for {len(layout.regions)} regions"
            )
        self._engine = open_engine(layout, region_addrs, host, protocol, device)
        self.memory = TransferMemory(layout, self._engine.port, list(region_addrs))
        """What to register."""
        self._kept: object = None

    @classmethod
    def of_tensors(
        cls,
        caches: Mapping[str, Sequence[torch.Tensor]],
        groups: Sequence[KvGroup],
        group_of: Mapping[str, int] | None = None,
        *,
        host: str,
        protocol: str = "tcp",
        device: str = "",
    ) -> WorkerTransfer:
        """The same for torch tensors, described as in `memory.tensor_layout`.

        Keeps the tensors alive until `close`. On an NPU the thread uses that one from then on.
        Raises RegionError as well.
        """
        places = {tensor.device for tensors in caches.values() for tensor in tensors}
        if len(places) > 1:
            raise LayoutError(f"the caches of one rank are on {', '.join(map(str, places))}")
        for place in places:
            if place.type == "npu":
                use_device(machine_number(place.index))
        layout = tensor_layout(caches, groups, group_of)
        addresses = [address for address, _ in tensor_storages(caches)]
        transfer = cls(layout, addresses, host, protocol, device)
        transfer._kept = caches
        return transfer

    def close(self) -> None:
        """Cut off every writer; when this returns the memory may be freed. Again is harmless."""
        self._engine.close()
        self._kept = None

    def __enter__(self) -> WorkerTransfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
