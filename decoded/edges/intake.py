"""Taking submits and cancels, of which one message may hold a hundred thousand."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TypeVar

from decoded.core import events as ev
from decoded.core.request import RequestKey
from decoded.wire import link as wire

from .router import RouterSocket
from .sessions import Session

T = TypeVar("T")

# Requests of one message that are taken before everybody else gets a turn.
SLICE = 512

Refuse = Callable[[RequestKey, int, str, str], None]


class Intake:
    """Turns submits and cancels into events.

    A long message is taken a slice per turn of the loop, and the link's next message
    waits for the last slice: whoever sent it counts on the order, but side channels,
    deadlines and metaserver calls must not wait. `flush` is called after each slice.
    """

    def __init__(
        self,
        router: RouterSocket,
        dispatch: Callable[..., None],
        refuse: Refuse,
        flush: Callable[[], None],
        counters: Counter[str],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._router = router
        self._dispatch = dispatch
        self._refuse = refuse
        self._flush = flush
        self._counters = counters
        self.listening_since = self._loop.time()

    def submit(self, session: Session, message: wire.Submit) -> None:
        """Raises WireError if the session may not submit."""
        if session.seat.role != "scheduler":
            raise wire.WireError("wrong_role", "only a scheduler submits", "submit")
        self._take(partial(self._submits, session), iter(message.requests))

    def cancel(self, session: Session, message: wire.Cancel) -> None:
        """Raises WireError if the session may not cancel."""
        if session.seat.role != "scheduler":
            raise wire.WireError("wrong_role", "only a scheduler cancels", "cancel")
        self._take(partial(self._cancels, session), iter(message.requests))

    def _submits(self, session: Session, items: list[wire.Submission]) -> list[ev.Event]:
        engine_id = session.seat.engine_id
        events: list[ev.Event] = []
        for item in items:
            key = RequestKey(engine_id, item.request_id)
            params = item.kv_transfer_params or {}
            marked = params.get("do_virtual")
            if marked is not None and not isinstance(marked, bool):
                text = "kv_transfer_params.do_virtual is true, false, null or absent"
                self._refuse(key, item.attempt, "invalid", text)
                continue
            events.append(
                ev.Submit(
                    key,
                    item.external_id,
                    item.attempt,
                    tuple([array("q", ids) for ids in item.block_ids]),
                    item.prompt_tokens,
                    item.cached_tokens,
                    bool(item.do_virtual or marked),
                    params,
                    item.timeout_s,
                )
            )
        return events

    def _cancels(self, session: Session, items: list[wire.Cancellation]) -> list[ev.Event]:
        engine_id = session.seat.engine_id
        return [ev.Cancel(RequestKey(engine_id, item.request_id), item.attempt) for item in items]

    def _take(self, events: Callable[[list[T]], list[ev.Event]], items: Iterator[T]) -> None:
        taken = list(islice(items, SLICE))
        self._dispatch(*events(taken))
        if len(taken) == SLICE:
            self._router.pause()
            self._loop.call_soon(self._take_next_slice, events, items)
        else:
            self._listen_again()

    def _take_next_slice(
        self, events: Callable[[list[T]], list[ev.Event]], items: Iterator[T]
    ) -> None:
        if self._router.closed:
            return
        try:
            self._take(events, items)
            self._flush()
        except Exception:
            self._counters["internal_errors"] += 1
            self._listen_again()
            raise

    def _listen_again(self) -> None:
        if self._router.paused:
            self.listening_since = self._loop.time()
            self._router.resume()
