"""What the engine submitted and has no outcome of yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from decoded.wire.link import (
    MAX_FRAME_BYTES,
    Cancel,
    Cancellation,
    Message,
    Submission,
)

from .errors import ClientOverloaded, DuplicateSubmission, InvalidSubmission
from .outcomes import Key

FRAME_BYTES = 1 << 20
"""Submissions are cut into frames of about this size, so that no batch blocks the link."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Submission)


class Prepared(NamedTuple):
    """A submission that was checked, in its bytes on the wire."""

    key: Key
    external_id: str
    raw: msgspec.Raw


class _Submit(Message, tag="submit"):
    """`wire.link.Submit` of submissions that are encoded already."""

    requests: list[msgspec.Raw]


def prepare(submissions: Iterable[Submission]) -> list[Prepared]:
    """Check and encode. Raises InvalidSubmission naming the request and the field.

    The check is the daemon's own: a submission it cannot read would take its whole
    batch with it, and nobody could tell whose fault it was.
    """
    return [_prepare(submission) for submission in submissions]


def _prepare(submission: Submission) -> Prepared:
    try:
        raw = _encoder.encode(submission)
        _decoder.decode(raw)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"request {getattr(submission, 'request_id', submission)!r}: {error}"
        raise InvalidSubmission(text) from error
    if len(raw) > MAX_FRAME_BYTES - 64:
        text = f"request {submission.request_id!r} takes {len(raw)} bytes; a frame has"
        raise InvalidSubmission(f"{text} {MAX_FRAME_BYTES}")
    key = Key(submission.request_id, submission.attempt)
    return Prepared(key, submission.external_id, msgspec.Raw(raw))


def submit_frames(prepared: Iterable[Prepared]) -> Iterator[bytes]:
    """`submit` frames of a bounded size, in order."""
    batch: list[msgspec.Raw] = []
    size = 0
    for one in prepared:
        length = len(memoryview(one.raw))
        if batch and size + length > FRAME_BYTES:
            yield _encoder.encode(_Submit(batch))
            batch, size = [], 0
        batch.append(one.raw)
        size += length
    if batch:
        yield _encoder.encode(_Submit(batch))


def cancel_frames(keys: Iterable[Key]) -> Iterator[bytes]:
    """`cancel` frames of a bounded size, in order."""
    batch = [Cancellation(key.request_id, key.attempt) for key in keys]
    for start in range(0, len(batch), 1000):
        yield _encoder.encode(Cancel(batch[start : start + 1000]))


class Pending:
    """Submissions without an outcome, in order, and which of them are to be cancelled."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.cancelled: dict[Key, None] = {}
        self._prepared: dict[Key, Prepared] = {}
        self._attempts: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._prepared)

    def __iter__(self) -> Iterator[Prepared]:
        return iter(self._prepared.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._prepared

    def get(self, key: Key) -> Prepared | None:
        return self._prepared.get(key)

    def add(self, submissions: Sequence[Prepared]) -> None:
        """All or nothing. Raises DuplicateSubmission or ClientOverloaded."""
        keys = {one.key for one in submissions}
        taken = keys & self._prepared.keys() if self._prepared else ()
        if taken or len(keys) < len(submissions):
            names = ", ".join(f"{key.request_id!r} attempt {key.attempt}" for key in sorted(taken))
            raise DuplicateSubmission(
                f"{names} still waits for an outcome; take it first, or submit a new attempt"
                if taken
                else "a request id and attempt occur twice in one submit"
            )
        if len(self) + len(submissions) > self.limit:
            raise ClientOverloaded(
                f"{len(self)} submissions wait for an outcome and {len(submissions)} more would "
                f"exceed max_pending={self.limit}; is the daemon running?"
            )
        for one in submissions:
            self._prepared[one.key] = one
            request_id, attempt = one.key
            self._attempts[request_id] = (*self._attempts.get(request_id, ()), attempt)

    def cancel(self, request_id: str, attempt: int | None) -> list[Key]:
        """Mark what is pending of a request; the attempts that this concerns."""
        found = self._attempts.get(request_id, ())
        keys = [Key(request_id, one) for one in found if attempt in (None, one)]
        self.cancelled.update(dict.fromkeys(keys))
        return keys

    def pop(self, key: Key) -> Prepared | None:
        """Forget a submission; None if it is not pending."""
        one = self._prepared.pop(key, None)
        if one is None:
            return None
        self.cancelled.pop(key, None)
        left = tuple(other for other in self._attempts[key.request_id] if other != key.attempt)
        if left:
            self._attempts[key.request_id] = left
        else:
            del self._attempts[key.request_id]
        return one


class Outbox:
    """What is pending, and what of it has yet to go out on the present connection.

    `keep`: False for a client that hears of no outcomes, so that nothing stays pending
    once it was sent.
    """

    def __init__(self, limit: int, keep: bool) -> None:
        self.pending = Pending(limit)
        self._keep = keep
        self._to_submit: list[Prepared] = []
        self._to_cancel: list[Key] = []

    def submit(self, submissions: Sequence[Prepared]) -> None:
        """Take all or none, to be sent. Raises like `Pending.add`."""
        self.pending.add(submissions)
        self._to_submit += submissions

    def cancel(self, request_id: str, attempt: int | None) -> bool:
        """Cancel what is pending of a request; False if nothing is."""
        keys = self.pending.cancel(request_id, attempt)
        self._to_cancel += keys
        return bool(keys)

    def again(self) -> None:
        """A new connection: everything is to be sent."""
        self._to_submit = list(self.pending)
        self._to_cancel = list(self.pending.cancelled)

    def frames(self) -> list[bytes]:
        """Frames of what is to be sent, submits before cancels; counts as sent."""
        if not self._to_submit and not self._to_cancel:
            return []
        still = [one for one in self._to_submit if self.pending.get(one.key) is one]
        frames = list(submit_frames(still))
        frames += cancel_frames(key for key in self._to_cancel if key in self.pending)
        self._to_submit, self._to_cancel = [], []
        if not self._keep:
            for one in still:
                self.pending.pop(one.key)
        return frames
