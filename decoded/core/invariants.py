"""What must hold of the core after every event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .request import Prefill, Request
from .states import State

if TYPE_CHECKING:
    from .machine import Core


def violations(core: Core) -> list[str]:
    """Every broken invariant, as a sentence; empty when all is well."""
    return [*_ledger(core), *_requests(core), *_engines(core)]


def _ledger(core: Core) -> list[str]:
    ledger, found = core.ledger, []
    external = {(r.key.engine_id, r.external_id): r for r in ledger.live.values()}
    if external != ledger.by_external:
        found.append("live requests and external ids do not match one to one")
    if len(ledger.tombstones) > core.settings.max_tombstones:
        found.append(f"{len(ledger.tombstones)} tombstones are over the bound")
    if len(ledger.announced) > core.settings.max_tombstones:
        found.append(f"{len(ledger.announced)} announced uses are over the bound")
    found += [f"{r.key} was never announced" for r in ledger.announced.values() if not r.announced]
    found += [f"{r.key} is live in {r.state}" for r in ledger.live.values() if r.state.terminal]
    found += [
        f"{r.key} is buried in {r.state}"
        for r in ledger.tombstones.values()
        if not r.state.terminal
    ]
    if len(core.deadlines) > 2 * len(ledger.live) + 2 * 1_024:
        found.append("the deadline heap is full of stale entries")
    return found


def _requests(core: Core) -> list[str]:
    found: list[str] = []
    waiting = core.deadlines.waiting()
    for request in core.ledger.live.values():
        where = f"{request.key} ({request.state.value})"
        if id(request) not in waiting:
            found.append(f"{where} has no deadline")
        if (request.state is State.DRAINING) != (request.ending is not None):
            found.append(f"{where} has ending {request.ending}")
        if (request.state is State.ACCEPTED) == request.announced:
            found.append(f"{where} has prefill {request.prefill.value}")
        if request.announced and not request.handed:
            found.append(f"{where} was announced by nobody")
        if request.state is State.DRAINING:
            begun = request.drained_from
            if request.prefill is Prefill.RUNNING:
                begun = max(begun, request.started_at + core.settings.prefill_timeout_s)
            if request.deadline < begun + core.settings.drain_s:
                found.append(f"{where} drains for less than the transfer time-out")
        if request.state is State.RECEIVING and request.all_done:
            found.append(f"{where} is whole but not done")
        found += _counts(request)
    return found


def _counts(request: Request) -> list[str]:
    found = []
    for number, rank in (request.progress or {}).items():
        spoken = sum(1 for s in rank.senders.values() if s.verdict.value != "pushing")
        failed = sum(1 for s in rank.senders.values() if s.verdict.value == "failed")
        if (spoken, failed) != (rank.spoken, rank.failed):
            found.append(f"{request.key} rank {number} miscounts its senders")
    return found


def _engines(core: Core) -> list[str]:
    found: list[str] = []
    live: dict[str, int] = {}
    for key in core.ledger.live:
        live[key.engine_id] = live.get(key.engine_id, 0) + 1
    for engine_id in live.keys() - core.engines.by_id.keys():
        found.append(f"requests of {engine_id} are live, but the engine is forgotten")
    for engine in core.engines.by_id.values():
        if engine.live != live.get(engine.engine_id, 0):
            found.append(f"engine {engine.engine_id} miscounts its requests")
        if engine.idle:
            found.append(f"engine {engine.engine_id} is idle but not forgotten")
        log = engine.log
        if not all(seat in engine.sessions for seat in engine.subscribers):
            found.append(f"engine {engine.engine_id} reports to seats that nobody holds")
        registered = engine.ranks.items() | engine.retiring.keys()
        if not engine.writable <= registered:
            found.append(f"engine {engine.engine_id} forgot registrations that can be written")
        if any(not log.base <= seq <= log.last for seq in log.acknowledged.values()):
            found.append(f"engine {engine.engine_id} has acknowledgements outside its log")
        if not all(engine.retiring.values()):
            found.append(f"engine {engine.engine_id} keeps an unused registration")
        for (rank, _), users in engine.retiring.items():
            if not users <= core.ledger.live.keys():
                found.append(f"rank {rank} of {engine.engine_id} waits for the dead")
    return found
