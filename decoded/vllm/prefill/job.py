"""One request's push on one rank, from the step's thread to the producer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import structlog

from decoded.producer import ProducerError, Push, PushResult

log = structlog.get_logger(__name__)

Ready = Callable[[], None]


class Job:
    """What of a request is to be pushed, and what has been handed to its push.

    The push is opened elsewhere, which takes a handshake; until then wishes gather here, and
    are handed over when it is there. No method waits. Any thread may call.
    """

    def __init__(self, request_id: str, prompt_tokens: int, layers: Sequence[str]) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.finished = False
        """vLLM is done with the request, and waits for its blocks."""
        self._layers = layers
        self._lock = threading.Lock()
        self._push: Push | None = None
        self._blocks: list[list[int]] = []
        self._new_blocks = False
        self._wanted: dict[str, tuple[int, Ready | None]] = {}
        self._handed: dict[str, int] = {}
        self._sealed = False
        self._failure = ""
        self._over: Future[PushResult] | None = None

    def blocks(self, block_ids: Sequence[Sequence[int]], fresh: bool) -> None:
        """The request has these blocks, per KV group: all that it has (`fresh`), or more."""
        with self._lock:
            if fresh or not self._blocks:
                self._blocks = [list(ids) for ids in block_ids]
            else:
                for mine, more in zip(self._blocks, block_ids, strict=True):
                    mine.extend(more)
            self._new_blocks = True

    def layer(self, name: str, computed: int, ready: Ready | None) -> None:
        """A layer holds this many of the prompt's tokens (when `ready` returns)."""
        with self._lock:
            if computed > self._wanted.get(name, (0, None))[0]:
                self._wanted[name] = computed, ready
                self._advance()

    def seal(self) -> None:
        """Every layer holds the prompt to its end."""
        with self._lock:
            self._sealed = True
            self._advance()

    def fail(self, reason: str) -> None:
        """The rest will not come."""
        with self._lock:
            if not self._sealed:
                self._failure = self._failure or reason
                self._advance()

    def take_back(self) -> None:
        """The request was preempted: what has not been handed over is computed again."""
        with self._lock:
            self._wanted = {name: (computed, None) for name, computed in self._handed.items()}
            self._sealed = self._sealed and self._over is not None

    def opened(self, push: Push) -> None:
        """The push is there."""
        with self._lock:
            self._push = push
            self._advance()

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

    def _advance(self) -> None:
        push = self._push
        if push is None or self._over is not None:
            return
        try:
            if self._new_blocks:
                self._new_blocks = False
                push.replace_blocks(self._blocks)
            for name in self._layers:
                computed, ready = self._wanted.get(name, (0, None))
                if computed > self._handed.get(name, 0):
                    push.layer(name, computed, ready)
                    self._handed[name] = computed
            if self._failure:
                self._over = push.fail(self._failure)
            elif self._sealed:
                self._over = push.seal()
        except ProducerError as error:
            self._over = push.fail(str(error))
