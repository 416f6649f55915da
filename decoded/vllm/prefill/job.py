"""One request's push on one rank, from the step's thread to the producer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

from decoded.producer import ProducerError, Push, PushResult, RemoteParams

log = structlog.get_logger(__name__)

Ready = Callable[[], None]


class Job:
    """What of a request is to be pushed, and what has been handed to its push.

    The push is opened elsewhere, which takes a handshake; until then wishes gather here, and
    are handed over when it is there. Only `let_go` waits. Any thread may call.
    """

    def __init__(
        self, request_id: str, params: RemoteParams, prompt_tokens: int, layers: int
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt_tokens = prompt_tokens
        self.finished = False
        """vLLM is done with the request, and waits for its blocks."""
        self._lock = threading.Lock()
        self._push: Push | None = None
        self._blocks: list[list[int]] = []
        self._wanted: list[tuple[int, Ready | None]] = [(0, None)] * layers
        self._sealed = False
        self._failure = ""
        self._over: Future[PushResult] | None = None

    @property
    def opening(self) -> bool:
        """Whether its push is yet to come."""
        return self._push is None and self._over is None

    def blocks(self, block_ids: Sequence[Sequence[int]], fresh: bool) -> None:
        """The request has these blocks, per KV group: all that it has (`fresh`), or more."""
        with self._lock:
            if self._push is not None:
                change = self._push.replace_blocks if fresh else self._push.add_blocks
                self._hand(self._push, change, block_ids)
            elif fresh:
                self._blocks = [list(ids) for ids in block_ids]
            else:
                for mine, more in zip(self._blocks, block_ids, strict=True):
                    mine.extend(more)

    def layer(self, index: int, computed: int, ready: Ready | None) -> None:
        """A layer holds this many of the prompt's tokens (when `ready` returns)."""
        with self._lock:
            if computed > self._wanted[index][0]:
                self._wanted[index] = computed, ready
                if self._push is not None:
                    self._hand(self._push, self._push.layer, index, computed, ready)

    def seal(self) -> None:
        """Every layer holds the prompt to its end."""
        with self._lock:
            self._sealed = True
            self._end()

    def fail(self, reason: str) -> None:
        """The rest will not come; nothing changes if all of it has."""
        with self._lock:
            if not self._sealed:
                self._failure = self._failure or reason
                self._end()

    def take_back(self) -> None:
        """The request has lost its blocks, and will be computed again: what was not handed over
        is forgotten. What was handed over is not sent again.
        """
        with self._lock:
            if self._push is None:
                self._wanted = [(0, None)] * len(self._wanted)
                self._sealed = False

    def let_go(self) -> None:
        """Blocks of the request are about to be overwritten: wait until its queued writes are
        over. What still waits for its push cannot be had any more.
        """
        with self._lock:
            push = self._push
            if push is None and any(computed for computed, _ in self._wanted):
                self._failure = self._failure or "P used its blocks again before D had answered"
        if push is not None:
            push.flush()

    def opened(self, push: Push) -> None:
        """The push is there."""
        with self._lock:
            self._push = push
            if not self._failure:
                self._hand(push, push.replace_blocks, self._blocks)
                for index, (computed, ready) in enumerate(self._wanted):
                    if computed:
                        self._hand(push, push.layer, index, computed, ready)
            self._end()

    def not_opened(self, error: BaseException) -> None:
        """It will never be; D has been told if it can be."""
        log.error("KV not pushed", request_id=self.request_id, error=str(error))
        with self._lock:
            self._over = Future()
            self._over.set_result(PushResult("failed", str(error), False, 0, 0, 0.0))

    def result(self) -> PushResult | None:
        """How the push ended; None while it is under way, or while more is to come."""
        over = self._over
        return over.result() if over is not None and over.done() else None

    def _hand(self, push: Push, call: Callable[..., None], *arguments: Any) -> None:
        if self._over is None:
            try:
                call(*arguments)
            except ProducerError as error:
                self._over = push.fail(str(error))

    def _end(self) -> None:
        push = self._push
        if push is None or self._over is not None:
            return
        if self._failure:
            self._over = push.fail(self._failure)
        elif self._sealed:
            try:
                self._over = push.seal()
            except ProducerError as error:
                self._over = push.fail(str(error))
