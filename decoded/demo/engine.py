"""The D process: an engine that submits the batch, and decodes with the KV it has received."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from decoded.client import Client, Outcome, Submission

from .cache import BlockPool, PagedCache
from .lines import Parent
from .memory import registered
from .model import Model, decode, prepare_torch
from .scenario import D_BLOCKS, ENGINE_ID, NEW_TOKENS, Arrangement, Request, make_batch
from .shape import BLOCK_SIZE

_NOISE_SEED = 1
_LOOK_EVERY_S = 0.5


@dataclass
class Sequence:
    """What the engine knows of a request it has submitted. `blocks`: those of its prompt."""

    request: Request
    blocks: list[int]
    submitted_at: float
    tokens: list[int] = field(default_factory=list)


class Engine:
    """Scheduler and worker of one rank in one loop, as in an engine: look, step, look."""

    def __init__(self, parent: Parent, folder: Path, scheduler: Client, cache: PagedCache) -> None:
        self._parent = parent
        self._folder = folder
        self._scheduler = scheduler
        self._cache = cache
        self._model = Model()
        self._params: dict[str, Any] = {}
        self._batch = make_batch()
        self._blocks = BlockPool(D_BLOCKS)
        self._cache.fill(_NOISE_SEED)
        self._noise = [cache.digest([block]) for block in range(D_BLOCKS)]
        self._sequences: dict[str, Sequence] = {}
        self._waiting: set[str] = set()
        self._decoding: dict[str, Iterator[int]] = {}

    def run(self, metaserver: str, orphaned: threading.Event) -> None:
        """Submit everything, and go on until every request has ended and is decoded.

        `metaserver`: the URL that a proxy would have put into each request.
        """
        self._params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "metaserver": metaserver,
        }
        self._submit([request for request in self._batch if request.after is None])
        while (self._waiting or self._decoding) and not orphaned.is_set():
            look = self._scheduler.poll if self._decoding else self._wait
            outcomes, now = look(), time.perf_counter()
            for outcome in outcomes:
                self._take(outcome, now)
            self._step()

    def touched(self) -> list[int]:
        """Blocks that no request ever had, and that somebody has written to all the same."""
        idle = [0, *self._blocks.free]
        return [block for block in idle if self._cache.digest([block]) != self._noise[block]]

    def dump_given_back(self) -> None:
        """Write down, once more, the blocks of requests that came without KV."""
        for sequence in self._sequences.values():
            if not sequence.request.decoded:
                self._dump(sequence, "end")

    def _wait(self) -> list[Outcome]:
        return self._scheduler.wait(_LOOK_EVERY_S)

    def _submit(self, requests: list[Request]) -> None:
        """Give each request its blocks, and the daemon the whole batch in one message."""
        for request in requests:
            blocks = self._cached_blocks(request)
            blocks += self._blocks.take(request.blocks - len(blocks), request.scattered)
            sequence = Sequence(request, blocks, time.perf_counter())
            self._sequences[request.request_id] = sequence
            self._dump(sequence, "before")
        begun_at = time.perf_counter()
        for request in requests:
            self._sequences[request.request_id].submitted_at = begun_at
        self._waiting |= {request.request_id for request in requests}
        self._scheduler.submit(*map(self._submission, requests))

    def _submission(self, request: Request) -> Submission:
        return Submission(
            request_id=request.request_id,
            external_id=request.external_id,
            block_ids=[self._sequences[request.request_id].blocks],
            prompt_tokens=len(request.prompt),
            cached_tokens=request.cached_tokens,
            kv_transfer_params={**self._params, "do_virtual": request.virtual},
        )

    def _cached_blocks(self, request: Request) -> list[int]:
        """The blocks, shared with an earlier request, that hold the prefix."""
        if request.after is None:
            return []
        owner = next(one for one in self._batch if one.external_id == request.after)
        return self._sequences[owner.request_id].blocks[: request.cached_blocks]

    def _take(self, outcome: Outcome, now: float) -> None:
        """One request has ended: its blocks are the engine's."""
        sequence = self._sequences[outcome.request_id]
        request = sequence.request
        self._dump(sequence, "after")
        self._waiting.discard(outcome.request_id)
        seen_s = now - sequence.submitted_at
        self._parent.tell(
            "outcome", id=request.external_id, seen_s=seen_s, **msgspec.structs.asdict(outcome)
        )
        if not outcome.ok:
            return
        if request.decoded:
            room = -(-(len(request.prompt) + NEW_TOKENS) // BLOCK_SIZE)
            blocks = sequence.blocks + self._blocks.take(room - len(sequence.blocks))
            tokens = decode(self._model, request.prompt, self._cache, blocks)
            self._decoding[outcome.request_id] = islice(tokens, NEW_TOKENS)
        self._submit([one for one in self._batch if one.after == request.external_id])

    def _step(self) -> None:
        """One more token of every request that is being decoded."""
        for request_id, tokens in list(self._decoding.items()):
            sequence = self._sequences[request_id]
            token = next(tokens, None)
            if token is not None:
                sequence.tokens.append(token)
                continue
            del self._decoding[request_id]
            self._parent.tell("tokens", id=sequence.request.external_id, tokens=sequence.tokens)

    def _dump(self, sequence: Sequence, when: str) -> None:
        path = self._folder / f"{sequence.request.external_id}.{when}"
        path.write_bytes(self._cache.dump(sequence.blocks))


class Listener(threading.Thread):
    """Hears the parent. A cancel is passed on at once, in the middle of whatever the loop does.

    Everything else is queued; None follows the last line.
    """

    def __init__(self, parent: Parent, scheduler: Client) -> None:
        super().__init__(name="listener", daemon=True)
        self.lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.orphaned = threading.Event()
        self._parent = parent
        self._scheduler = scheduler

    def run(self) -> None:
        while (message := self._parent.hear()) is not None:
            if message["what"] == "cancel":
                self._cancel(message["id"])
            else:
                self.lines.put(message)
        self.orphaned.set()
        self.lines.put(None)

    def _cancel(self, external_id: str) -> None:
        """Cancel, and tell in which state the daemon then has the request.

        The link keeps the order, so by the time of its answer the daemon has the cancel.
        """
        [request] = [one for one in make_batch() if one.external_id == external_id]
        self._scheduler.cancel(request.request_id)
        status = self._scheduler.status(request_id=request.request_id, engine_id=ENGINE_ID)
        states = [found["state"] for found in status["requests"]]
        self._parent.tell("cancelling", id=external_id, states=states)


def main() -> None:
    parent = Parent()
    endpoint, folder = sys.argv[1], Path(sys.argv[2])
    arrangement: Arrangement = sys.argv[3]  # type: ignore[assignment] # the parent checks it
    npu = int(sys.argv[4])
    prepare_torch()
    with (
        Client(endpoint, ENGINE_ID, name="demo scheduler") as scheduler,
        Client(endpoint, ENGINE_ID, "worker", subscribe=False, name="demo worker") as worker,
        registered(worker, arrangement, npu) as cache,
    ):
        listener = Listener(parent, scheduler)
        listener.start()
        engine = Engine(parent, folder, scheduler, cache)
        parent.tell("ready")
        if (start := listener.lines.get()) is None:
            return
        engine.run(start["metaserver"], listener.orphaned)
        parent.tell("finished")
        # Nobody may write any more by the time of the next line.
        if listener.lines.get() is None:
            return
        engine.dump_given_back()
        parent.tell("sealed", touched=engine.touched())
        listener.lines.get()


if __name__ == "__main__":
    main()
