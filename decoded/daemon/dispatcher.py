"""The one route: every event goes into the core here, every effect is carried out here."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from decoded.core import Core, reasons
from decoded.core import effects as fx
from decoded.core import events as ev
from decoded.core.request import RequestKey
from decoded.core.states import State
from decoded.edges.throttle import Throttle
from decoded.path import Path

log = structlog.get_logger("decoded.requests")


class Link(Protocol):
    """What the dispatcher asks of the engine link."""

    @property
    def outcome_ready(self) -> Callable[[str], None]: ...
    def resend(self, seat: ev.Seat, first: int) -> None: ...
    def refuse(self, key: RequestKey, attempt: int, code: str, detail: str) -> None: ...
    def flush(self) -> None: ...


class Memory(Protocol):
    """What the dispatcher asks of the registrations."""

    def fence(self, effect: fx.Fence) -> None: ...
    def release(self, effect: fx.Release) -> None: ...


class Dispatcher:
    """Runs the core on the event loop. `wire_up` it before the first event."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.idle = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._queue: deque[ev.Event] = deque()
        self._bugs = Throttle()
        self._running = False
        self._ended: list[fx.Report] = []
        self._turn_ends = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._perform: dict[type, Callable[[Any], None]] = {}

    def wire_up(self, link: Link, memory: Memory, receiver: Path, virtual: Path) -> None:
        """Say who carries out effects."""
        self._link = link
        self._outcome_ready = link.outcome_ready
        self._receiver = receiver
        self._virtual = virtual
        self._perform = {
            fx.Start: self._start,
            fx.Stop: self._stop,
            fx.Report: self._report,
            fx.Resend: lambda effect: link.resend(effect.seat, effect.first),
            fx.Refuse: self._refuse,
            fx.Fence: memory.fence,
            fx.Release: memory.release,
        }

    def dispatch(self, *events: ev.Event) -> None:
        """Handle `events` and whatever follows from them in this turn.

        An event that arises while another is handled waits for its end. What raises is a
        bug: it is logged and counted as `internal_errors`, and the other events and
        effects are carried out all the same. A request whose path could not start fails.
        """
        queue = self._queue
        queue.extend(events)
        if self._running:
            return
        self._running = True
        core, perform, now = self.core, self._perform, self._loop.time()
        try:
            while queue:
                event = queue.popleft()
                try:
                    effects = core.handle(event, now)
                except Exception:  # noqa: BLE001 - logged and counted
                    self._bug("an event could not be handled", type(event))
                    continue
                for effect in effects:
                    try:
                        perform[type(effect)](effect)
                    except Exception:  # noqa: BLE001 - logged and counted
                        self._bug("an effect could not be carried out", type(effect))
        finally:
            self._running = False
        if not self._turn_ends:
            self._turn_ends = True
            self._loop.call_soon(self._after_turn)

    def _bug(self, what: str, kind: type) -> None:
        self.core.counters["internal_errors"] += 1
        if self._bugs.passes():
            log.exception(what, kind=kind.__name__, skipped=self._bugs.skipped)

    def _start(self, effect: fx.Start) -> None:
        request = effect.request
        try:
            path = self._virtual if request.virtual else self._receiver
            self._queue.extend(path.start(request))
        except Exception:
            detail = "the daemon failed to start it; see its log"
            self._queue.append(
                ev.StartFailed(request.key, request.attempt, reasons.INTERNAL, detail)
            )
            raise

    def _stop(self, effect: fx.Stop) -> None:
        request = effect.request
        (self._virtual if request.virtual else self._receiver).stop(request)
        if self.core.shutting_down and not self.core.ledger.live:
            self.idle.set()

    def _report(self, effect: fx.Report) -> None:
        self._outcome_ready(effect.request.key.engine_id)
        self._ended.append(effect)

    def _after_turn(self) -> None:
        """What one turn's events leave to be done once: wake in time, send, and log at last."""
        self._turn_ends = False
        self._arm()
        # The link has sent what its own turn reported; other turns have not.
        self._link.flush()
        ended, self._ended = self._ended, []
        if log.is_enabled_for(logging.INFO):
            for effect in ended:
                self._log_end(effect)

    def _log_end(self, effect: fx.Report) -> None:
        outcome = effect.outcome
        extra = {} if outcome.state is State.DONE else {"detail": outcome.detail}
        log.info(
            "request ended",
            engine_id=effect.request.key.engine_id,
            request_id=outcome.request_id,
            external_id=outcome.external_id,
            attempt=outcome.attempt,
            state=outcome.state.value,
            reason=outcome.reason,
            elapsed_s=round(outcome.elapsed_s, 6),
            **extra,
        )

    def _refuse(self, effect: fx.Refuse) -> None:
        log.info(
            "request refused",
            engine_id=effect.key.engine_id,
            request_id=effect.key.request_id,
            attempt=effect.attempt,
            reason=effect.code,
            detail=effect.detail,
        )
        self._link.refuse(effect.key, effect.attempt, effect.code, effect.detail)

    def _arm(self) -> None:
        """Wake for the core's next deadline; a timer that fires too early just looks again."""
        due = self.core.next_deadline()
        if due is None or due >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        self.dispatch(ev.Tick())

    def close(self) -> None:
        """Stop waking."""
        if self._timer is not None:
            self._timer.cancel()
