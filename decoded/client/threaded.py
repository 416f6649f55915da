"""A driver that several threads share, and the I/O thread that runs it while they do not.

Whoever has something to send sends it, under a lock: a hop to the I/O thread would
cost as much as a fourth of a round trip. (A ZMQ socket may be used by several threads
as long as a lock is between them.) The I/O thread reads what comes in meanwhile, keeps
the heartbeats and reconnects. Its epoll set holds the socket's descriptor, except
while a caller waits for outcomes: that caller polls it in the thread's place.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections import deque

from decoded.wire.link import Hello

from . import errors
from .driver import Driver
from .outcomes import Outcome
from .pacing import Limits
from .session import Answer

LOOK_EVERY_S = 20e-6
"""`look` looks at the socket at most this often; it takes about 1 us."""

EXIT_LINGER_S = 0.1
"""Time for the good-bye of a client that nobody closed."""


class ThreadedDriver:
    """Methods that say so are called with `lock` held; it is never held while waiting.

    `outcomes` is what has arrived. `error`, once set, is why everything is over.
    """

    def __init__(self, endpoint: str, hello: Hello, limits: Limits | None) -> None:
        self.endpoint = endpoint
        self.lock = threading.Lock()
        self.arrived = threading.Condition(self.lock)
        self.outcomes: deque[Outcome] = deque()
        self.error: errors.ClientError | None = None
        self.driver = Driver(endpoint, hello, limits)
        self.session = self.driver.session
        self._answers: dict[int, Answer] = {}
        self._abandoned = False
        self._linger_s = 0.0
        self._look_at = 0.0
        self._sleeps_until = 0.0
        self._reader: int | None = None
        self._reader_wake = _eventfd(self)
        self._wake = _eventfd(self)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self.driver.fd, select.EPOLLIN)
        self._thread = threading.Thread(
            target=self._main, name=f"decoded-client-{hello.engine_id}", daemon=True
        )
        self._thread.start()
        _running.add(self)

    def check(self) -> None:
        """Raise why everything is over, if it is."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until there is an outcome, until all is over, or for so long."""
        due = None if timeout_s is None else time.monotonic() + timeout_s
        leads = False
        try:
            with self.lock:
                if self._reader is not None:
                    self.arrived.wait_for(lambda: self.outcomes or self.error, timeout_s)
                elif self.error is None:
                    leads = True
                    self._reader = threading.get_ident()
                    self._epoll.unregister(self.driver.fd)
            if leads:
                self._read_until(due)
        finally:
            if leads:
                with self.lock:
                    self._reader = None
                    if self.error is None:
                        self._epoll.register(self.driver.fd, select.EPOLLIN)

    def look(self) -> None:
        """Read the socket for a caller that polls: in a loop that polls without a pause
        the I/O thread would get the interpreter only every few milliseconds.
        """
        if time.monotonic() < self._look_at or not self.lock.acquire(blocking=False):
            return
        try:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            if self.error is None and self.driver.dealer.readable:
                self.pump()
        finally:
            self.lock.release()

    def close(self, linger_s: float) -> None:
        """Say good-bye; unsent frames get so long."""
        if isinstance(self.error, errors.ClientForked):
            return
        with self.lock:
            if self.error is None:
                self._linger_s = linger_s if self.session.up else 0.0
                self.session.bye()
                self.pump()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        """Have the I/O thread close it; for a finalizer, which may take no lock."""
        self._abandoned = True
        os.eventfd_write(self._wake, 1)

    # Under the lock

    def pump(self) -> None:
        """Do everything that can be done now, and tell those who wait for it."""
        answers: list[tuple[int, Answer]] = []
        error: errors.ClientError | None = None
        try:
            now = time.monotonic()
            earlier_fd = self.driver.fd
            if self.driver.reconnect(now):
                self._move_reader(earlier_fd)
            arrived = self.driver.exchange(now, self.outcomes, answers)
            due = self.session.next_deadline()
            error = self.session.fatal
        except BaseException as defect:
            # Frames may be lost half-way, also by a KeyboardInterrupt: there is no way on.
            broken = errors.ClientBroken(f"the client's I/O failed: {defect!r}")
            broken.__cause__ = defect
            self._end(broken)
            if isinstance(defect, Exception):
                raise broken from defect
            raise
        self._answers.update(answers)
        if error is not None:
            self._end(error)
        elif arrived:
            self._tell()
        if due is not None and due < self._sleeps_until:
            self._sleeps_until = due
            os.eventfd_write(self._wake, 1)

    def _move_reader(self, earlier_fd: int) -> None:
        """The socket is a new one: whoever polls it polls that. (The old one is closed, and
        so gone from the epoll set, unless its number is used again.)
        """
        if self._reader is None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(earlier_fd)
            self._epoll.register(self.driver.fd, select.EPOLLIN)
        elif self._reader != threading.get_ident():
            os.eventfd_write(self._reader_wake, 1)

    def _tell(self) -> None:
        self.arrived.notify_all()
        if self._reader is not None and self._reader != threading.get_ident():
            os.eventfd_write(self._reader_wake, 1)

    def _end(self, error: errors.ClientError) -> None:
        if self.error is None:
            self.error = error
        self._tell()
        os.eventfd_write(self._wake, 1)

    # Waiting

    def _read_until(self, due: float | None) -> None:
        """Be the one who reads the socket until there is an outcome, or time is over."""
        while not self.outcomes and self.error is None:
            left = None if due is None else due - time.monotonic()
            if left is not None and left <= 0:
                return
            poller = select.poll()
            poller.register(self.driver.fd, select.POLLIN)
            poller.register(self._reader_wake, select.POLLIN)
            for ready, _ in poller.poll(None if left is None else math.ceil(left * 1000)):
                if ready == self._reader_wake:
                    os.eventfd_read(ready)
            with self.lock:
                if self.error is None:
                    self.pump()

    def answer(self, token: int, what: str, timeout_s: float) -> Answer:
        """Wait, with the lock held, for a call's answer; raise it if it is an error."""
        self.pump()
        self.arrived.wait_for(lambda: token in self._answers or self.error, timeout_s)
        if token not in self._answers:
            self.check()
            self.session.abandon(token)
            self.pump()
            raise self.session.no_answer(what, self.endpoint, timeout_s)
        answer = self._answers.pop(token)
        if isinstance(answer, errors.ClientError):
            raise answer
        return answer

    # The I/O thread

    def _main(self) -> None:
        error: errors.ClientError = errors.ClientBroken("the client's I/O thread ended")
        try:
            self._run()
        except BaseException as defect:  # noqa: BLE001 - the next call raises it
            error = errors.ClientBroken(f"the client's I/O thread failed: {defect!r}")
            error.__cause__ = defect
        with self.lock:
            self._end(error)
            self._epoll.close()
            self.driver.dealer.close(self._linger_s)

    def _run(self) -> None:
        while True:
            with self.lock:
                if self.error is not None:
                    return
                self._sleeps_until = 0.0
                if self._abandoned:
                    self._linger_s = EXIT_LINGER_S
                    self.session.bye()
                self.pump()
                if self.error is not None:
                    return
                due = self.session.next_deadline() or 0.0
                self._sleeps_until = due
            # Not cut short by the rounding of `epoll`, which is down to milliseconds.
            for ready, _ in self._epoll.poll(max(due - time.monotonic() + 0.001, 0.0)):
                if ready == self._wake:
                    os.eventfd_read(ready)


def _eventfd(owner: object) -> int:
    """Closed with its owner, when no thread can be about to write to it."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    # Not at exit either: clients still say good-bye then.
    weakref.finalize(owner, os.close, fd).atexit = False
    return fd


_running: weakref.WeakSet[ThreadedDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for each in _running:
        each.error = errors.ClientForked("the client was made before a fork; make one in the child")
        each.outcomes.clear()


def _at_exit() -> None:
    for each in list(_running):
        each.close(EXIT_LINGER_S)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
