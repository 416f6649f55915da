"""The demo's judge: a run that is as it should be passes, and every kind of fault is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from decoded.demo.evidence import Evidence
from decoded.demo.scenario import NEW_TOKENS, Request, make_batch
from decoded.demo.shape import SHAPE, block_len
from decoded.demo.verify import Report, judge

BATCH = make_batch()
STORY = ["accepted", "receiving", "draining", "sender done", "cancelled"]


def good_run(folder: Path) -> Evidence:
    """Evidence of a run in which everything went well, with random bytes for KV."""
    evidence = Evidence(folder, touched=[], exit_codes={"daemon": 0, "D": 0})
    for request in BATCH:
        name = request.external_id
        outcome = {"state": request.state, "reason": request.reason, "detail": ""}
        evidence.outcomes[name] = [{**outcome, "elapsed_s": 0.1, "seen_s": 0.2}]
        before = random.Random(name).randbytes(request.blocks * 2 * SHAPE.layers * block_len())
        after = before
        if request.pushed:
            after = push(request, evidence, before)
        if request.pause_at is not None:
            evidence.cancelling[name] = ["draining"]
        if request.decoded:
            evidence.tokens[name] = list(range(NEW_TOKENS))
            evidence.reference[name] = list(range(NEW_TOKENS))
        else:
            write(evidence, request, "end", after)
        write(evidence, request, "before", before)
        write(evidence, request, "after", after)
    return evidence


def push(request: Request, evidence: Evidence, before: bytes) -> bytes:
    """P's part of the evidence; returns D's blocks as they are then."""
    name, size = request.external_id, block_len()
    layers = SHAPE.layers if request.fail_at is None else request.fail_at
    ours = bytearray(random.Random(name + " on P").randbytes(len(before)))
    after = bytearray(before)
    for row in range(SHAPE.layers * 2):
        begin = row * request.blocks * size
        middle, end = begin + request.cached_blocks * size, begin + request.blocks * size
        ours[begin:middle] = before[begin:middle]
        if row < layers * 2:
            after[middle:end] = ours[middle:end]
    write(evidence, request, "p", bytes(ours))
    evidence.pushes[name] = {
        "state": "done" if request.fail_at is None else "failed",
        "acknowledged": True,
        "detail": "",
        "layers": layers,
        "nbytes": (request.blocks - request.cached_blocks) * layers * 2 * size,
    }
    evidence.daemon[name] = {
        "ranks": [{"senders": [{"layers_in": layers}]}],
        "story": [{"what": what} for what in STORY],
    }
    return bytes(after)


def write(evidence: Evidence, request: Request, when: str, content: bytes) -> None:
    evidence.folder.joinpath(f"{request.external_id}.{when}").write_bytes(content)


def flip(evidence: Evidence, dump: str, offset: int) -> None:
    """Change one bit of the KV that was written down."""
    path = evidence.folder / dump
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def judged(evidence: Evidence) -> Report:
    return judge(BATCH, evidence, "engine")


def test_a_good_run_passes(tmp_path: Path) -> None:
    report = judged(good_run(tmp_path))
    assert report.all_problems == []
    assert report.ok
    assert sum(row.blocks_compared for row in report.rows) == sum(
        request.blocks for request in BATCH if request.pushed
    )


FAULTS: dict[str, tuple[Callable[[Evidence], object], str]] = {
    "no outcome": (lambda e: e.outcomes.pop("long"), "long: it has 0 outcomes, not one"),
    "two outcomes": (
        lambda e: e.outcomes["long"].append(e.outcomes["long"][0]),
        "long: it has 2 outcomes, not one",
    ),
    "a wrong outcome": (
        lambda e: e.outcomes.update(broken=e.outcomes["short"]),
        "broken: the outcome is done (received: ), not failed (sender_failed)",
    ),
    "a wrong reason": (
        lambda e: e.outcomes.update(cached=e.outcomes["all-cached"]),
        "cached: the outcome is done (nothing_to_fetch: ), not done (received)",
    ),
    "a bit lost on the way": (
        lambda e: flip(e, "partial.after", block_len() * 3 * 2 + 5),
        "partial: not P's bytes in block 0 of K in layer 1",
    ),
    "a bit of the last block": (
        lambda e: flip(e, "long.after", -1),
        "long: not P's bytes in block 38 of V in layer 9",
    ),
    "a cached prefix that was written to": (
        lambda e: (flip(e, "cached.after", 0), flip(e, "cached.p", 0)),
        "cached: written to, though D held it already: block 0 of K in layer 0",
    ),
    "a write after P had failed": (
        lambda e: (flip(e, "broken.after", -1), flip(e, "broken.end", -1)),
        "broken: written to after P had failed: block 6 of V in layer 9",
    ),
    "a write to a virtual request": (
        lambda e: (flip(e, "virtual-2.after", 3), flip(e, "virtual-2.end", 3)),
        "virtual-2: written to, though nobody sends to it: block 0 of K in layer 0",
    ),
    "a late write to a virtual request": (
        lambda e: flip(e, "virtual-1.end", 0),
        "virtual-1: its blocks were written to after its outcome",
    ),
    "a late write to a cancelled request": (
        lambda e: flip(e, "cancelled.end", 9),
        "cancelled: its blocks were written to after its outcome",
    ),
    "a write to nobody's blocks": (
        lambda e: setattr(e, "touched", [0, 7]),
        "blocks of no request were written to: [0, 7]",
    ),
    "other tokens": (
        lambda e: e.tokens.update(block=[5]),
        f"block: D decoded [5], the single-process run {list(range(NEW_TOKENS))}",
    ),
    "no tokens at all": (
        lambda e: (e.tokens.pop("block"), e.reference.pop("block")),
        "block: D decoded [], the single-process run []",
    ),
    "a cancel that ended at once": (
        lambda e: e.cancelling.update(cancelled=["cancelled"]),
        "cancelled: after the cancel the daemon had it as ['cancelled'], not draining",
    ),
    "an outcome before the writer was gone": (
        lambda e: e.early.add("cancelled"),
        "cancelled: its outcome came while P was still to write",
    ),
    "a story in the wrong order": (
        lambda e: e.daemon["cancelled"]["story"].sort(key=lambda entry: entry["what"]),
        "cancelled: the daemon's story is accepted, cancelled, draining, receiving, sender done",
    ),
    "a push that was not asked for": (
        lambda e: e.pushes.update({"virtual-3": e.pushes["short"]}),
        "virtual-3: P pushed it, for no reason",
    ),
    "a push that was not made": (lambda e: e.pushes.pop("short"), "short: P did not push it"),
    "a layer that was not sent": (
        lambda e: e.pushes.update(short={**e.pushes["short"], "layers": 9}),
        "short: P has written 9 layers, 81920 bytes, not 10, 81920 bytes",
    ),
    "a push without acknowledgement": (
        lambda e: e.pushes.update(short={**e.pushes["short"], "acknowledged": False}),
        "short: P's push is done, acknowledged: False ()",
    ),
    "no progress": (
        lambda e: e.daemon.pop("short"),
        "short: the daemon saw 0 of 10 layers come in",
    ),
    "KV that was not written down": (
        lambda e: e.folder.joinpath("long.p").unlink(),
        "long: P has not written down its blocks",
    ),
    "a process that ended badly": (
        lambda e: e.exit_codes.update(daemon=-9),
        "the daemon process ended with code -9, not 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(tmp_path: Path, fault: str) -> None:
    evidence = good_run(tmp_path)
    spoil, problem = FAULTS[fault]
    spoil(evidence)
    report = judged(evidence)
    assert report.all_problems == [problem]
    assert not report.ok


def test_a_report_without_rows_is_not_good() -> None:
    assert not Report("engine").ok
