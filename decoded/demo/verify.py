"""Whether everything in a run is as it should be; if not, what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from decoded.kv.layout import fetch_bytes

from .evidence import ALL_LAYERS, Dump, Evidence, differing
from .scenario import D_BLOCKS, NEW_TOKENS, Request
from .shape import SHAPE, kv_layout

_NAMED = 3


@dataclass
class Row:
    """One request as it turned out.

    `blocks`: of its prompt. `blocks_sent`, `nbytes`, `layers`: what P has written to D.
    `layers_seen`: layers in by the daemon's count. `blocks_compared`: blocks of D, all
    layers, that were compared with P's, of which `blocks_differing` are not the same.
    `tokens_equal`: of `tokens` generated, those that are also the single-process run's.
    `finished_s`: from submit to the outcome by the daemon's clock; `seen_s`: until the engine
    looked, between two of its steps.
    """

    request: str
    kind: str
    virtual: bool
    expected: str
    outcome: str = "none"
    reason: str = ""
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    blocks: int = 0
    blocks_sent: int = 0
    nbytes: int = 0
    layers: int = 0
    layers_seen: int = 0
    blocks_compared: int = 0
    blocks_differing: int = 0
    tokens: int = 0
    tokens_equal: int = 0
    finished_s: float = 0.0
    seen_s: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass
class Report:
    """A whole run. `problems`: what concerns no single request; each row has its own."""

    memory: str
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.all_problems and bool(self.rows)

    @property
    def all_problems(self) -> list[str]:
        """Everything that is not as it should be, one sentence each."""
        return self.problems + [
            f"{row.request}: {problem}" for row in self.rows for problem in row.problems
        ]


def judge(batch: Sequence[Request], evidence: Evidence, memory: str) -> Report:
    """Hold a finished run against what the batch asks for."""
    report = Report(memory, [_judge_one(request, evidence) for request in batch])
    if evidence.touched:
        report.problems.append(f"blocks of no request were written to: {evidence.touched}")
    for name, code in evidence.exit_codes.items():
        if code != 0:
            report.problems.append(f"the {name} process ended with code {code}, not 0")
    return report


def _judge_one(request: Request, evidence: Evidence) -> Row:
    row = Row(
        request.external_id,
        request.kind,
        request.virtual,
        request.state,
        prompt_tokens=len(request.prompt),
        cached_tokens=request.cached_tokens,
        blocks=request.blocks,
    )
    _outcome(request, evidence, row)
    _push(request, evidence, row)
    before, after = evidence.dump(request, "before"), evidence.dump(request, "after")
    if before is None or after is None:
        row.problems.append("D has not written down its blocks")
        return row
    if request.pushed:
        _received(request, evidence, before, after, row)
    else:
        _unchanged(before, after, range(request.blocks), "though nobody sends to it", row)
    if not request.decoded:
        end = evidence.dump(request, "end")
        if end is None or end.content != after.content:
            row.problems.append("its blocks were written to after its outcome")
    else:
        _tokens(request, evidence, row)
    return row


def _outcome(request: Request, evidence: Evidence, row: Row) -> None:
    outcomes = evidence.outcomes.get(request.external_id, [])
    if len(outcomes) != 1:
        row.problems.append(f"it has {len(outcomes)} outcomes, not one")
    if not outcomes:
        return
    first = outcomes[0]
    row.outcome, row.reason, row.detail = first["state"], first["reason"], first["detail"]
    row.finished_s, row.seen_s = first["elapsed_s"], first["seen_s"]
    if (row.outcome, row.reason) != (request.state, request.reason):
        row.problems.append(
            f"the outcome is {row.outcome} ({row.reason}: {row.detail}), "
            f"not {request.state} ({request.reason})"
        )
    if request.pause_at is not None:
        _drained(request, evidence, row)


def _drained(request: Request, evidence: Evidence, row: Row) -> None:
    """A cancelled request ends when its writer has gone, and not before."""
    states = evidence.cancelling.get(request.external_id)
    if states != ["draining"]:
        row.problems.append(f"after the cancel the daemon had it as {states}, not draining")
    if request.external_id in evidence.early:
        row.problems.append("its outcome came while P was still to write")
    report = evidence.daemon.get(request.external_id, {"story": []})
    told = [entry["what"] for entry in report["story"]]
    order = [what for what in told if what in ("draining", "sender done", "cancelled")]
    if order != ["draining", "sender done", "cancelled"]:
        row.problems.append(f"the daemon's story is {', '.join(told)}")


def _push(request: Request, evidence: Evidence, row: Row) -> None:
    push = evidence.pushes.get(request.external_id)
    if (push is not None) != request.pushed:
        row.problems.append("P did not push it" if push is None else "P pushed it, for no reason")
    if push is None or not request.pushed:
        return
    row.nbytes, row.layers = push["nbytes"], push["layers"]
    row.blocks_sent = request.blocks - request.cached_blocks
    whole = fetch_bytes(kv_layout(D_BLOCKS, "d"), row.prompt_tokens, row.cached_tokens)
    layers = SHAPE.layers if request.fail_at is None else request.fail_at
    expected = whole * layers // SHAPE.layers
    if (row.layers, row.nbytes) != (layers, expected):
        row.problems.append(
            f"P has written {row.layers} layers, {row.nbytes} bytes, not {layers}, {expected} bytes"
        )
    state = "done" if request.fail_at is None else "failed"
    if push["state"] != state or not push["acknowledged"]:
        row.problems.append(
            f"P's push is {push['state']}, acknowledged: {push['acknowledged']} ({push['detail']})"
        )
    report = evidence.daemon.get(request.external_id, {"ranks": []})
    seen = [sender["layers_in"] for rank in report["ranks"] for sender in rank["senders"]]
    row.layers_seen = min(seen, default=0)
    # Progress goes its own way, so what is left of it at DONE comes too late to count.
    if not 0 < row.layers_seen <= layers:
        row.problems.append(f"the daemon saw {row.layers_seen} of {layers} layers come in")


def _received(request: Request, evidence: Evidence, before: Dump, after: Dump, row: Row) -> None:
    """D's blocks hold P's bytes where P has written, and are as they were elsewhere."""
    ours = evidence.dump(request, "p")
    if ours is None:
        row.problems.append("P has not written down its blocks")
        return
    written = ALL_LAYERS if request.fail_at is None else range(request.fail_at)
    # P's prefill of the cached prefix gave the same bits, though D has them from elsewhere.
    differ = differing(after, ours, written, range(request.blocks))
    row.blocks_compared = request.blocks
    row.blocks_differing = len({name.split()[1] for name in differ})
    if differ:
        row.problems.append(f"not P's bytes in {_some(differ)}")
    _unchanged(before, after, range(request.cached_blocks), "though D held it already", row)
    rest = differing(before, after, range(written.stop, SHAPE.layers), range(request.blocks))
    if rest:
        row.problems.append(f"written to after P had failed: {_some(rest)}")


def _unchanged(before: Dump, after: Dump, blocks: range, why: str, row: Row) -> None:
    touched = differing(before, after, ALL_LAYERS, blocks)
    if touched:
        row.problems.append(f"written to, {why}: {_some(touched)}")


def _tokens(request: Request, evidence: Evidence, row: Row) -> None:
    mine = evidence.tokens.get(request.external_id, [])
    theirs = evidence.reference.get(request.external_id, [])
    row.tokens = len(mine)
    row.tokens_equal = sum(a == b for a, b in zip(mine, theirs, strict=False))
    if mine != theirs or len(mine) != NEW_TOKENS:
        row.problems.append(f"D decoded {mine}, the single-process run {theirs}")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
