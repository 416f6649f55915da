"""What the daemon tells about itself: the body of a status report."""

from __future__ import annotations

import itertools
from typing import Any

from decoded.core import Core
from decoded.core.engines import Engine
from decoded.core.events import Seat
from decoded.core.request import RankProgress, Request, RequestKey
from decoded.receiver.registrations import Registration, Registrations
from decoded.wire.link import StatusQuery


def engines_report(core: Core, registrations: Registrations) -> list[dict[str, Any]]:
    """Every engine: seats, registrations, requests in flight, outcomes not yet acknowledged."""
    return [_engine(engine, registrations) for engine in core.engines.by_id.values()]


def requests_report(
    core: Core, registrations: Registrations, query: StatusQuery, now: float
) -> list[dict[str, Any]]:
    """Up to `query.limit` requests in flight, or the one asked for with its story."""
    if query.request_id is not None:
        found = _find(core, query.engine_id, query.request_id)
        return [{**_request(r, registrations, now), "story": _story(core, r)} for r in found]
    live = (
        request
        for request in core.ledger.live.values()
        if query.engine_id in (None, request.key.engine_id)
    )
    return [_request(r, registrations, now) for r in itertools.islice(live, query.limit)]


def states_report(core: Core) -> dict[str, int]:
    """How many requests are in flight per state, and how many have ended in each."""
    counts = {"accepted": 0, "receiving": 0, "draining": 0}
    for request in core.ledger.live.values():
        counts[request.state.value] += 1
    ended = {k[len("ended_") :]: n for k, n in core.counters.items() if k.startswith("ended_")}
    return {**counts, **ended}


def _engine(engine: Engine, registrations: Registrations) -> dict[str, Any]:
    log = engine.log
    seats = sorted({*engine.sessions, *log.acknowledged})
    return {
        "engine_id": engine.engine_id,
        "world_size": engine.world_size,
        "ready": engine.ready,
        "generation": engine.generation,
        "in_flight": engine.live,
        "reported": log.last,
        "unacknowledged": len(log),
        "seats": [_seat(engine, seat) for seat in seats],
        "ranks": [
            _rank(registration)
            for rank in sorted(engine.ranks)
            if (registration := registrations.current(engine.engine_id, rank)) is not None
        ],
        "draining_registrations": [
            {"rank": rank, "generation": generation, "requests": len(users)}
            for (rank, generation), users in engine.retiring.items()
        ],
    }


def _seat(engine: Engine, seat: Seat) -> dict[str, Any]:
    acknowledged = engine.log.acknowledged.get(seat)
    return {
        "role": seat.role,
        "rank": seat.rank,
        "connected": seat in engine.sessions,
        "unacknowledged": None if acknowledged is None else engine.log.last - acknowledged,
    }


def _rank(registration: Registration) -> dict[str, Any]:
    opened = registration.opened
    return {
        "rank": registration.seat.rank,
        "generation": registration.generation,
        "source": opened.source,
        "te_rpc_port": opened.te_rpc_port,
        "layers": len(opened.layout.layers),
        "bytes": sum(region.size for region in opened.layout.regions),
    }


def _find(core: Core, engine_id: str | None, request_id: str) -> list[Request]:
    """Requests by internal or external id; tombstones too."""
    engines = [engine_id] if engine_id is not None else list(core.engines.by_id)
    found = [core.ledger.find(RequestKey(engine, request_id)) for engine in engines]
    if not any(found):
        found = [core.ledger.by_external.get((engine, request_id)) for engine in engines]
    if not any(found):
        found = [
            ended
            for key, ended in core.ledger.tombstones.items()
            if request_id in (key.request_id, ended.external_id)
            and engine_id in (None, key.engine_id)
        ]
    return [request for request in found if request is not None]


def _request(request: Request, registrations: Registrations, now: float) -> dict[str, Any]:
    registration = registrations.current(request.key.engine_id, 0)
    layers = len(registration.opened.layout.layers) if registration is not None else None
    ended = request.state.terminal
    return {
        "engine_id": request.key.engine_id,
        "request_id": request.key.request_id,
        "external_id": request.external_id,
        "attempt": request.attempt,
        "state": request.state.value,
        "reason": request.reason,
        "detail": request.detail,
        "virtual": request.virtual,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "age_s": (request.ended_at if ended else now) - request.submitted_at,
        "deadline_in_s": None if ended else request.deadline - now,
        "layers": None if request.virtual else layers,
        "ranks": [
            _progress(rank, progress) for rank, progress in sorted((request.progress or {}).items())
        ],
    }


def _progress(rank: int, progress: RankProgress) -> dict[str, Any]:
    return {
        "rank": rank,
        "expected_senders": progress.expected,
        "senders": [
            {
                "sender": name,
                "state": sender.verdict.value,
                "layers_in": bin(sender.layers).count("1"),
            }
            for name, sender in progress.senders.items()
        ],
    }


def _story(core: Core, request: Request) -> list[dict[str, Any]]:
    return [
        {"at_s": entry.time - request.submitted_at, "what": entry.what, "detail": entry.detail}
        for entry in core.story(request.key)
    ]
