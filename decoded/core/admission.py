"""Whether a submit is taken, ignored as a repeat, or refused with a reason."""

from __future__ import annotations

from . import reasons
from .engines import Engine
from .events import Submit
from .ledger import Ledger
from .request import Request
from .settings import CoreSettings


def plainly_new(
    event: Submit, engine: Engine, ledger: Ledger, settings: CoreSettings, shutting_down: bool
) -> bool:
    """True where nothing is known that `is_repeat` or `why_refused` would have to look into."""
    key, log = event.key, engine.log
    return (
        key not in ledger.live
        and (key.engine_id, event.external_id) not in ledger.by_external
        and key not in ledger.tombstones
        and not log.remembers(key.request_id)
        and not shutting_down
        and len(ledger.live) < settings.max_requests
        and len(log) < settings.max_unacknowledged
    )


def is_repeat(event: Submit, engine: Engine, ledger: Ledger) -> bool:
    """True for a submit that was taken before: the client resends what has no outcome yet.

    An ended attempt whose outcome the scheduler has acknowledged is no repeat: the
    engine uses the same id again. The log is asked, not the tombstones: an outcome
    that is still to be sent must never be joined by a second one.
    """
    live = ledger.live.get(event.key)
    if live is not None:
        mine = live.log == engine.log.log and live.attempt == event.attempt
        return mine and _same(live, event)
    return engine.log.awaits(engine.scheduler, event.key.request_id, event.attempt)


def why_refused(
    event: Submit, engine: Engine, ledger: Ledger, settings: CoreSettings, shutting_down: bool
) -> tuple[str, str] | None:
    """The code and the detail of a refusal, or None when the submit is taken."""
    key = event.key
    live = ledger.live.get(key)
    if live is not None and live.log != engine.log.log:
        detail = f"a request of the engine's last scheduler is {live.state.value}; try again later"
        return reasons.LIVE_DUPLICATE, detail
    if live is not None:
        detail = f"attempt {live.attempt} is {live.state.value}; wait for its outcome"
        return reasons.LIVE_DUPLICATE, detail
    newest = _newest_ended(event, engine, ledger)
    if event.attempt < newest:
        return reasons.STALE_ATTEMPT, f"attempt {newest} has already ended"
    if shutting_down:
        return reasons.SHUTTING_DOWN, "the daemon takes no new requests; submit to the next one"
    other = ledger.by_external.get((key.engine_id, event.external_id))
    if other is not None:
        detail = f"request {other.key.request_id} is in flight with this external id"
        return reasons.DUPLICATE_EXTERNAL_ID, detail
    if len(ledger.live) >= settings.max_requests:
        return reasons.TOO_MANY_REQUESTS, f"{settings.max_requests} requests are in flight"
    if len(engine.log) >= settings.max_unacknowledged:
        seat = engine.log.slowest()
        who = f"{seat.role} {seat.rank}" if seat else "nobody"
        detail = f"{who} has not acknowledged {len(engine.log)} outcomes; is it running?"
        return reasons.TOO_MANY_UNACKNOWLEDGED, detail
    return None


def _newest_ended(event: Submit, engine: Engine, ledger: Ledger) -> int:
    ended = ledger.tombstones.get(event.key)
    remembered = ended.attempt if ended is not None and ended.log == engine.log.log else 0
    return max(remembered, engine.log.last_attempt(event.key.request_id))


def _same(request: Request, event: Submit) -> bool:
    return (
        request.external_id == event.external_id
        and request.blocks == event.blocks
        and request.prompt_tokens == event.prompt_tokens
        and request.cached_tokens == event.cached_tokens
        and request.virtual == event.virtual
    )
