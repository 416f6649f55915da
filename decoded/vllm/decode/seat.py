"""A worker's seat at the daemon: its client and its registration, kept up beside the steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import structlog

from decoded.client import Client, ClientError, Outcome
from decoded.kv.layout import LayoutError
from decoded.kv.regions import RegionError
from decoded.kv.transfer import TransferError

from .lifeline import greet
from .memory import Arrangement

log = structlog.get_logger(__name__)

REOPEN_EVERY_S = 2.0
"""Pause between tries to get a lost seat back."""


class Seat:
    """`connect` makes a client for this rank; `port` is the side channel port that is wanted.

    `open` blocks and raises; after that nothing does. A daemon that restarts is met by the
    client itself. What the client cannot mend (it gave up; or writers of the daemon's
    earlier life have to be shut out first) is done in a thread.
    """

    def __init__(
        self, connect: Callable[[], Client], arrangement: Arrangement, port: int | None
    ) -> None:
        self._connect = connect
        self._arrangement = arrangement
        self._port = port
        self._client: Client | None = None
        self._boot = ""
        self._opening: Future[None] | None = None
        self._closing = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="decoded-seat")

    def open(self, timeout_s: float) -> None:
        """Take the seat and register the memory, at start. Raises ClientError, LayoutError,
        RegionError, TransferError.
        """
        client = self._connect()
        try:
            welcome = greet(client, timeout_s)
            registration = client.register_kv(self._arrangement.open(), self._port, timeout_s)
        except BaseException:
            client.close(0)
            self._arrangement.close()
            raise
        self._client, self._boot = client, welcome.boot
        log.info(
            "KV memory registered",
            endpoint=client.endpoint,
            generation=registration.generation,
            side_channel=f"{registration.side_channel_host}:{registration.side_channel_port}",
        )

    def poll(self) -> list[Outcome]:
        """Outcomes that the daemon has sent to this rank. Never blocks on the daemon."""
        if self._opening is not None:
            if not self._opening.done():
                return []
            self._opening.result()
            self._opening = None
        client = self._client
        if client is None:
            return []
        try:
            boot = client.boot
            if boot:
                self.fence(boot)
            return [] if self._opening is not None else client.poll()
        except ClientError as error:
            if self._closing.is_set():
                return []
            # The scheduler passes outcomes on meanwhile; loads wait for the registration.
            log.error("lost the seat at the daemon; taking it anew", error=str(error))
            self._reopen()
            return []

    def fence(self, boot: str) -> None:
        """Outcomes of the daemon's life `boot` are to be believed: shut out writers that an
        earlier life told where to write, where that is this process's to do.
        """
        if boot != self._boot and self._opening is None:
            self._boot = boot
            if self._arrangement.fence():
                self._reopen()

    def close(self, for_good: bool) -> None:
        """Give the seat up; the memory is not written to any more.

        `for_good`: this process is about to end. vLLM kills workers soon after it has told
        them, and a gigabyte of shared memory would be left to whoever looks next.
        """
        self._closing.set()
        if for_good:
            self._arrangement.leave()
        self._thread.shutdown()
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._arrangement.close()

    def _reopen(self) -> None:
        client, self._client = self._client, None
        self._opening = self._thread.submit(self._open_until_done, client)

    def _open_until_done(self, old: Client | None) -> None:
        if old is not None:
            old.close(0)
        while not self._closing.is_set():
            try:
                self.open(REOPEN_EVERY_S)
                return
            except (ClientError, LayoutError, RegionError, TransferError) as error:
                log.warning("no seat at the daemon yet", error=str(error))
                self._closing.wait(REOPEN_EVERY_S)
