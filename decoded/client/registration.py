"""A worker's wish to have its KV memory served, kept true across daemon restarts."""

from __future__ import annotations

from dataclasses import dataclass

from decoded.wire.layout import KvLayout, KvMemory, TransferMemory
from decoded.wire.link import KvRegistered, RegisterKv

RETRIED = frozenset({"pool_taken", "port_taken", "transfer_unavailable", "shutting_down"})
"""Refusals of a repeated registration that pass when the daemon is done with the old one."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What the daemon serves for this rank.

    `generation` is new after each (re-)registration. `side_channel_port` is world
    rank 0's. `layout`: where the memory is; for the daemon's pool, what to map. After
    a daemon restart the pool is a new one, with nothing in it.
    """

    generation: int
    side_channel_host: str
    side_channel_port: int
    layout: KvLayout


class Wish:
    """What is to be registered, what is, and when to try again."""

    def __init__(self) -> None:
        self.current: Registration | None = None
        self.retry_at: float | None = None
        self._message: RegisterKv | None = None
        self._boot = ""
        self._tries = 0

    @property
    def token(self) -> int | None:
        """The token of the registration that is wished for, if any."""
        return None if self._message is None else self._message.token

    @property
    def repeated(self) -> bool:
        """The registration was sent more than once, so that the daemon may still know it."""
        return self._tries > 1

    def make(self, token: int, memory: KvMemory, side_channel_port: int | None) -> RegisterKv:
        """Wish for this memory from now on, instead of any other."""
        self.drop()
        self._message = RegisterKv(token, memory, side_channel_port)
        return self._message

    def drop(self) -> None:
        """Wish for nothing."""
        self.current = self.retry_at = self._message = None
        self._tries = 0

    def message(self) -> RegisterKv | None:
        """The message to send for the wish; counts as sent."""
        self.retry_at = None
        self._tries += 1
        return self._message

    def missing(self, boot: str, generation: int | None) -> bool:
        """Whether a daemon that knows `generation` of this seat has yet to be told."""
        if self._message is None:
            return False
        current = self.current
        return current is None or boot != self._boot or generation != current.generation

    def is_void(self, boot: str) -> bool:
        """Whether the daemon's life `boot` must not be told of what an earlier one served.

        Who was told then where to write may still be at it, through an engine that is the
        worker's and outlived the daemon. Only the worker can close that.
        """
        message, served = self._message, self.current is not None
        own = message is not None and isinstance(message.memory, TransferMemory)
        return own and served and boot != self._boot

    def came_true(self, answer: KvRegistered, boot: str) -> Registration:
        """Note the daemon's answer."""
        self._boot, self._tries, self.retry_at = boot, 0, None
        self.current = Registration(
            answer.generation, answer.side_channel_host, answer.side_channel_port, answer.layout
        )
        return self.current
