"""Whether a submit is taken, ignored as a repeat, or refused with a reason."""

from __future__ import annotations

from . import reasons
from .engines import Engine
from .events import Seat, Submit
from .ledger import Ledger
from .request import Request
from .settings import CoreSettings


def is_repeat(event: Submit, engine: Engine, ledger: Ledger) -> bool:
    """True for a submit that was taken before: the client resends what has no outcome yet.

    An ended attempt whose outcome the scheduler has acknowledged is no repeat: the
    engine uses the same id again.
    """
    live = ledger.live.get(event.key)
    if live is not None:
        return live.attempt == event.attempt and _same(live, event)
    ended = _ended_here(event, engine, ledger)
    return ended is not None and ended.attempt == event.attempt and not _known(engine, ended)


def why_refused(
    event: Submit, engine: Engine, ledger: Ledger, settings: CoreSettings, shutting_down: bool
) -> tuple[str, str] | None:
    """The code and the detail of a refusal, or None when the submit is taken."""
    key = event.key
    live = ledger.live.get(key)
    if live is not None:
        detail = f"attempt {live.attempt} is {live.state.value}; wait for its outcome"
        return reasons.LIVE_DUPLICATE, detail
    ended = _ended_here(event, engine, ledger)
    if ended is not None and event.attempt < ended.attempt:
        return reasons.STALE_ATTEMPT, f"attempt {ended.attempt} has already ended"
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


def _ended_here(event: Submit, engine: Engine, ledger: Ledger) -> Request | None:
    ended = ledger.tombstones.get(event.key)
    return ended if ended is not None and ended.log == engine.log.log else None


def _known(engine: Engine, ended: Request) -> bool:
    acknowledged = engine.log.acknowledged.get(Seat(engine.engine_id, "scheduler", 0))
    return acknowledged is None or acknowledged >= ended.report_seq


def _same(request: Request, event: Submit) -> bool:
    return (
        request.external_id == event.external_id
        and request.blocks == event.blocks
        and request.prompt_tokens == event.prompt_tokens
        and request.cached_tokens == event.cached_tokens
        and request.virtual == event.virtual
    )
