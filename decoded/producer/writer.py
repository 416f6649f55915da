"""The push threads of a P rank: each owns a Mooncake engine and does one thing at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from decoded.kv.transfer import TransferEngine, TransferError

from .errors import PushError
from .plan import Writes


@dataclass(frozen=True)
class WriterSettings:
    """How a push thread starts Mooncake. `regions`: (address, bytes) of what it registers.

    `on_thread_start` runs first in each thread: with Ascend it has to set the device.
    """

    host: str
    protocol: str
    device: str
    regions: Sequence[tuple[int, int]]
    on_thread_start: Callable[[], None] | None = None


class Writer:
    """A thread that writes with Mooncake, in the order in which work is submitted.

    Its engine is started by `open`, or with the first write. `lanes`: how many use it.
    """

    def __init__(self, settings: WriterSettings, name: str) -> None:
        self._settings = settings
        self._engine: TransferEngine | None = None
        self._started = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self.lanes = 0

    def open(self) -> int:
        """Start the engine now; returns its port. Raises TransferError, and what
        `on_thread_start` raises.
        """
        return self._pool.submit(self._open).result().port

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Queue `work`, which must not raise; returns at once what is done when it is, and
        all that was queued before it. Raises PushError once closed.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise PushError("the producer is closed") from error

    def write(self, session: str, writes: Writes) -> None:
        """One batch write; only in this thread. Raises TransferError.

        When that happens nothing is being written any more: Mooncake reports the first
        piece that fails while others may be under way, or times out while it still writes,
        so the engine is closed, which ends them, and a new one is opened.
        """
        engine = self._engine or self._open()
        try:
            engine.write(session, writes.sources, writes.destinations, writes.lengths)
        except TransferError:
            self._close()
            raise

    def close(self) -> Future[None]:
        """Take no more work; done when what is queued is, and the engine is closed."""
        closed = self._pool.submit(self._close)
        self._pool.shutdown(wait=False)
        return closed

    def _open(self) -> TransferEngine:
        settings = self._settings
        if not self._started and settings.on_thread_start is not None:
            settings.on_thread_start()
        self._started = True
        engine = TransferEngine.open(settings.host, settings.protocol, settings.device)
        try:
            for address, size in settings.regions:
                engine.register(address, size)
        except BaseException:
            engine.close()
            raise
        self._engine = engine
        return engine

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


class Lane:
    """The way to one D rank's memory, for all pushes that go there: one after the other.

    `failures`: how many writes have failed; `problem`: the last one's reason.
    """

    def __init__(self, session: str, writer: Writer) -> None:
        self.session = session
        self.failures = 0
        self.problem = ""
        self.pushes = 0
        self.writer = writer

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """As `Writer.submit`."""
        return self.writer.submit(work)

    def write(self, writes: Writes) -> None:
        """As `Writer.write`, to this lane's session."""
        try:
            self.writer.write(self.session, writes)
        except TransferError as error:
            self.problem = str(error)
            self.failures += 1
            raise


class Writers:
    """Up to `most` writers, and who uses which.

    A write to a D node that has stopped takes until Mooncake's time-out. Pushes to other D
    nodes go through other writers meanwhile, as long as there are any. Any thread may call.
    The first is opened at once; raises TransferError, and what `on_thread_start` raises.
    """

    def __init__(self, settings: WriterSettings, most: int) -> None:
        self._settings = settings
        self._most = most
        self._lock = threading.Lock()
        self._numbers = count()
        self._writers: list[Writer] = []
        self._lanes: dict[str, Lane] = {}
        first = self._another()
        try:
            self.port = first.open()
        except BaseException:
            first.close()
            raise

    def take(self, session: str) -> Lane:
        """The lane to a session, which is "" for a push that writes nothing; `give_back` it."""
        with self._lock:
            lane = self._lanes.get(session)
            if lane is None:
                lane = self._lanes[session] = Lane(session, self._choose())
                lane.writer.lanes += 1
            lane.pushes += 1
            return lane

    def give_back(self, lane: Lane) -> None:
        """A push has ended."""
        with self._lock:
            lane.pushes -= 1
            if not lane.pushes:
                del self._lanes[lane.session]
                lane.writer.lanes -= 1

    def close(self) -> None:
        """Finish what is queued and close the engines. Raises TransferError."""
        with self._lock:
            closed = [writer.close() for writer in self._writers]
        problems = [problem for each in closed if (problem := each.exception()) is not None]
        if problems:
            raise problems[0]

    def _choose(self) -> Writer:
        best = min(self._writers, key=lambda writer: writer.lanes)
        return self._another() if best.lanes and len(self._writers) < self._most else best

    def _another(self) -> Writer:
        writer = Writer(self._settings, f"decoded-push-{next(self._numbers)}")
        self._writers.append(writer)
        return writer
