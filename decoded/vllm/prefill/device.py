"""What pushing takes where the caches are on a device: its streams, and threads that use it."""

from __future__ import annotations

from collections.abc import Callable

from ..caches import Caches


def _nothing() -> None:
    return None


def recorder(device_type: str) -> Callable[[], Callable[[], None] | None]:
    """What notes how far the device's stream is; returns what waits for that. On CPU what was
    called has been done.
    """
    if device_type == "cpu":
        return _nothing
    import torch

    device = getattr(torch, device_type)

    def record() -> Callable[[], None]:
        event = device.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    return record


def device_setter(caches: Caches) -> Callable[[], None] | None:
    """Contexts of devices belong to threads: the push thread has to have this worker's."""
    if caches.device_type == "cpu":
        return None
    import torch

    index = next(iter(caches.tensors.values()))[0].device.index
    device = getattr(torch, caches.device_type)
    return lambda: device.set_device(index)
