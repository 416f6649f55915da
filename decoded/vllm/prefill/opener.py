"""Opens pushes away from the step's thread, so that a D node that is gone delays nobody else's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from decoded.producer import HandshakeError, Producer, PushRequest, RemoteAddress

from .job import Job

HANDSHAKES = 8
"""At the same time, each with another D engine; one that does not answer takes 3 s."""


class Opener:
    """Opens each job's push once. With a D engine that is not known one handshake is made,
    and its other requests wait for that: they share an engine that does not answer.
    """

    def __init__(self, producer: Producer, groups: int) -> None:
        self._producer = producer
        self._no_blocks: list[list[int]] = [[] for _ in range(groups)]
        self._known = ThreadPoolExecutor(1, thread_name_prefix="decoded-open")
        self._new = ThreadPoolExecutor(HANDSHAKES, thread_name_prefix="decoded-handshake")
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Job]] = {}

    def open(self, job: Job) -> None:
        """Returns at once; the job hears how it went. Raises RuntimeError once closed."""
        engine_id = job.params.remote_engine_id
        with self._lock:
            if self._producer.knows(job.params):
                self._known.submit(self._open, job)
            elif engine_id in self._waiting:
                self._waiting[engine_id].append(job)
            else:
                self._new.submit(self._greet, job)
                self._waiting[engine_id] = []

    def close(self) -> None:
        """Open no more. Handshakes under way are not waited for."""
        self._known.shutdown(wait=False, cancel_futures=True)
        self._new.shutdown(wait=False, cancel_futures=True)

    def _greet(self, job: Job) -> None:
        error = self._open(job)
        with self._lock:
            others = self._waiting.pop(job.params.remote_engine_id)
        for other in others:
            try:
                if not isinstance(error, HandshakeError):
                    self.open(other)
                    continue
                if not error.answered:
                    self._producer.refuse(RemoteAddress.of(other.params))
            except RuntimeError as closed:
                other.not_opened(closed)
            else:
                other.not_opened(error)

    def _open(self, job: Job) -> BaseException | None:
        """What kept the push from being opened."""
        request = PushRequest(job.params, job.prompt_tokens, self._no_blocks, job.request_id)
        try:
            push = self._producer.open(request)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the blocks must come back
            job.not_opened(error)
            return error
        job.opened(push)
        return None
