"""A D worker's KV memory: shared with the daemon, or written to by Mooncake in the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from decoded.client.memory import give_up_shared, share_tensors
from decoded.client.transfer import WorkerTransfer
from decoded.wire.layout import KvMemory, SharedMemory

from ..caches import Caches
from ..settings import Settings, SettingsError


class Arrangement(Protocol):
    """What a worker registers, and how it shuts out writers that the daemon cannot."""

    def open(self) -> KvMemory:
        """Make the memory reachable; blocks. Raises LayoutError, RegionError, TransferError."""

    def fence(self) -> bool:
        """The daemon that served it is gone: cut off writers. True: `open` it anew."""

    def leave(self) -> None:
        """This process ends, and may be killed before it is done with that."""

    def close(self) -> None:
        """Cut off everybody."""


class SharedCaches:
    """Caches that the daemon maps: on CPU moved to shared memory. Writers are its to fence."""

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._memory: SharedMemory | None = None

    def open(self) -> KvMemory:
        caches = self._caches
        self._memory = share_tensors(caches.tensors, caches.groups, caches.group_of)
        return self._memory

    def fence(self) -> bool:
        return False

    def leave(self) -> None:
        if self._memory is not None:
            give_up_shared(self._memory)

    def close(self) -> None:
        return None


class OwnTransfer:
    """Caches that the daemon cannot map: this process runs Mooncake.

    Each life of the daemon gets a Mooncake engine of its own: closing it ends what producers
    of an earlier life may still be writing.
    """

    def __init__(self, caches: Caches, host: str, protocol: str, device: str) -> None:
        self._open: Callable[[], WorkerTransfer] = lambda: WorkerTransfer.of_tensors(
            caches.tensors,
            caches.groups,
            caches.group_of,
            host=host,
            protocol=protocol,
            device=device,
        )
        self._transfer: WorkerTransfer | None = None

    def open(self) -> KvMemory:
        self.close()
        self._transfer = self._open()
        return self._transfer.memory

    def fence(self) -> bool:
        self.close()
        return True

    def leave(self) -> None:
        return None

    def close(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()


def arrange(caches: Caches, settings: Settings) -> Arrangement:
    """The arrangement that is configured; `auto` shares CPU memory and nothing else: an
    NPU's can be shared as well, where the driver registers what another process allocated.

    Raises SettingsError.
    """
    device = caches.device_type
    kind = settings.memory
    if kind == "auto":
        kind = "shared" if device == "cpu" else "transfer"
    if kind == "shared":
        if device not in ("cpu", "npu"):
            raise SettingsError(
                f"kv_connector_extra_config.memory is shared, but the KV caches are on {device}: "
                "set transfer"
            )
        return SharedCaches(caches)
    return OwnTransfer(caches, settings.host, settings.protocol, settings.device)
