"""The push thread of a P rank: it owns the Mooncake engine and does one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from decoded.kv.transfer import TransferEngine, TransferError

from .errors import PushError
from .plan import Writes


class Writer:
    """A thread that writes with Mooncake, in the order in which work is submitted.

    `regions`: (address, bytes) of what is registered. `on_thread_start` runs first in the
    thread: with Ascend it has to set the device. Raises TransferError, and what that raises.
    """

    def __init__(
        self,
        host: str,
        protocol: str,
        device: str,
        regions: Sequence[tuple[int, int]],
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        self._host, self._protocol, self._device = host, protocol, device
        self._regions = list(regions)
        self._engine: TransferEngine | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="decoded-push")
        try:
            if on_thread_start is not None:
                self._pool.submit(on_thread_start).result()
            self.port = self._pool.submit(self._open).result()
        except BaseException:
            self._pool.shutdown()
            raise

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue `work`, which must not raise; returns at once what is done when it is, and
        all that was queued before it. Raises PushError once closed.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise PushError("the producer is closed") from error

    def write(self, session: str, writes: Writes) -> None:
        """One batch write; only in the push thread. Raises TransferError.

        When that happens nothing is being written any more: Mooncake reports the first
        piece that fails while others may be under way, or times out while it still writes,
        so the engine is closed, which ends them, and a new one is opened.
        """
        if self._engine is None:
            self._open()
        assert self._engine is not None
        try:
            self._engine.write(session, writes.sources, writes.destinations, writes.lengths)
        except TransferError:
            self._close()
            raise

    def close(self) -> None:
        """Finish what is queued and close the engine. Raises TransferError."""
        try:
            self._pool.submit(self._close).result()
        finally:
            self._pool.shutdown()

    def _open(self) -> int:
        engine = TransferEngine.open(self._host, self._protocol, self._device)
        try:
            for address, size in self._regions:
                engine.register(address, size)
        except BaseException:
            engine.close()
            raise
        self._engine = engine
        return engine.port

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
