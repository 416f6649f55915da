"""A rank's KV memory, wherever it is: mapped, and registered with a Mooncake engine."""

from __future__ import annotations

from collections.abc import Sequence

from decoded.wire.layout import KvLayout, Region

from .layout import LayoutError, spans
from .npu import ALIGNMENT, MAX_REGIONS, NpuRegion
from .regions import SharedRegion
from .transfer import TransferEngine, TransferError

KvRegion = SharedRegion | NpuRegion


def attach_region(region: Region) -> KvRegion:
    """Map a region that another process shares; on an NPU the thread then uses that one.

    Raises RegionError.
    """
    if region.npu is not None:
        return NpuRegion.attach(region)
    return SharedRegion.attach(region.name, region.size)


def open_engine(
    layout: KvLayout, addresses: Sequence[int], host: str, protocol: str, device: str
) -> TransferEngine:
    """A Mooncake engine that lets producers write to `layout`.

    `addresses`: where each region lies in this process. With `ascend` the calling thread
    must use the device that they are on. Raises LayoutError, TransferError.
    """
    on_npu = any(region.npu is not None for region in layout.regions)
    if protocol == "ascend":
        check_ascend(layout, addresses)
    elif on_npu:
        raise TransferError(f"protocol {protocol} does not reach an NPU's memory: use ascend")
    engine = TransferEngine.open(host, protocol, device)
    try:
        for address, region, (start, size) in zip(
            addresses, layout.regions, spans(layout), strict=True
        ):
            if protocol == "ascend":
                # A storage may begin before its first aligned byte.
                engine.register(address + start, size)
            else:
                engine.register(address, region.size)
    except BaseException:
        engine.close()
        raise
    return engine


def check_ascend(layout: KvLayout, addresses: Sequence[int]) -> None:
    """Raise LayoutError for what Mooncake's `ascend` cannot register, naming the layer."""
    if len(layout.regions) > MAX_REGIONS:
        first = next(
            layer.name
            for layer in layout.layers
            if any(tensor.region >= MAX_REGIONS for tensor in layer.tensors)
        )
        raise LayoutError(
            f"layer {first!r} is in memory region {MAX_REGIONS + 1} of {len(layout.regions)}, and "
            f"ascend registers {MAX_REGIONS}: allocate several layers in one piece"
        )
    for group, kv_group in enumerate(layout.groups):
        if kv_group.num_blocks < 2:
            first = next((layer.name for layer in layout.layers if layer.group == group), "")
            raise LayoutError(
                f"layer {first!r} has one block, and that is block 0, which must stay unused: "
                "producers write to it while they connect"
            )
    for index, (address, (start, _)) in enumerate(zip(addresses, spans(layout), strict=True)):
        if (address + start) % ALIGNMENT:
            first = next(
                layer.name
                for layer in layout.layers
                if any((tensor.region, tensor.offset) == (index, start) for tensor in layer.tensors)
            )
            raise LayoutError(
                f"layer {first!r} begins at {address + start:#x}, which is no multiple of 2 MiB, "
                "as ascend wants it: allocate 2 MiB more and begin at the next multiple"
            )
