"""Reading a report log so that each outcome is handed out once."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from decoded.wire.link import Acknowledge, Finished, OutcomeItem, Refusal

State = Literal["done", "failed", "cancelled", "expired", "refused"]


class Key(NamedTuple):
    """What one outcome answers."""

    request_id: str
    attempt: int


class Outcome(msgspec.Struct, frozen=True):
    """How one attempt ended.

    `state`: `done` means that the KV is whole; after any other state its blocks must
    not be used, but are free to be given away. `refused` was never taken on.
    `reason` is for machines, `detail` for people. `elapsed_s`: from submit, by the
    daemon's clock; 0 for a refusal.
    """

    request_id: str
    external_id: str
    attempt: int
    state: State
    reason: str
    detail: str = ""
    elapsed_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if the KV is whole."""
        return self.state == "done"


def reported(item: OutcomeItem) -> Outcome:
    """The outcome in a `finished` message."""
    return Outcome(
        item.request_id,
        item.external_id,
        item.attempt,
        item.state,
        item.reason,
        item.detail,
        item.elapsed_s,
    )


def refused(item: Refusal, external_id: str) -> Outcome:
    """The outcome that a refusal is."""
    return Outcome(item.request_id, external_id, item.attempt, "refused", item.reason, item.detail)


class Gap(Exception):
    """Outcomes are missing between what was seen and this batch."""


class LogReader:
    """Follows the daemon's numbered outcomes; the numbers of one log tell repeats.

    A new log starts its numbers anew. It may repeat outcomes of the log before it
    (the daemon restarted, and a scheduler had not seen them yet), which only a
    memory of what was handed out can tell: `remember` ids of it.
    """

    def __init__(self, remember: int) -> None:
        self.log: str | None = None
        self.repeats = 0
        self._seen: int | None = None
        self._taken: int | None = None
        self._resynced = False
        self._remember = remember
        self._handed_out: dict[Key, str] = {}

    def welcomed(self, log: str) -> None:
        """A session is open on `log`. The next batch may skip numbers: those outcomes are
        not kept any more.
        """
        self._resynced = True
        if log != self.log:
            self.log, self._seen, self._taken = log, None, None

    def read(self, message: Finished) -> list[OutcomeItem]:
        """The outcomes of a batch that were not seen before. Raises Gap if some are missing."""
        if message.log != self.log:
            # A new log under an open session: the scheduler started anew, and so do its ids.
            self._handed_out.clear()
            self.welcomed(message.log)
        if self._seen is None or (self._resynced and message.first > self._seen + 1):
            self._seen = message.first - 1
        if message.first > self._seen + 1:
            raise Gap(f"outcome {self._seen + 1} is missing before {message.first}")
        self._resynced = False
        fresh = message.outcomes[self._seen + 1 - message.first :]
        self.repeats += len(message.outcomes) - len(fresh)
        self._seen += len(fresh)
        return fresh

    def first_time(self, key: Key) -> bool:
        """False for an outcome that was handed out from an earlier log."""
        log = self.log or ""
        earlier = self._handed_out.pop(key, log)
        self._handed_out[key] = log
        if len(self._handed_out) > self._remember:
            del self._handed_out[next(iter(self._handed_out))]
        if earlier != log:
            self.repeats += 1
        return earlier == log

    def take(self) -> None:
        """The application has all that was read."""
        self._taken = self._seen

    def acknowledgement(self) -> Acknowledge | None:
        """What to tell the daemon that the application has; None while that is nothing."""
        if self.log is None or self._taken is None:
            return None
        return Acknowledge(self.log, self._taken)
