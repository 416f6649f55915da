"""The synchronous client: for an engine's own loop, which it never holds up."""

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
from types import TracebackType
from typing import Any, cast

from decoded.wire.layout import KvMemory
from decoded.wire.link import Submission, Welcome

from . import errors
from .driver import Driver
from .identity import Role, make_hello
from .outcomes import Outcome
from .registration import Registration
from .session import Answer, Limits
from .submissions import prepare

LOOK_EVERY_S = 20e-6
"""`poll` looks at the socket itself at most this often; a look takes about 1 us."""


class Client:
    """A client whose socket lives in an I/O thread of its own.

    Any thread may call it. `submit`, `cancel` and `poll` do not wait for anything; the
    others wait for the daemon, at most as long as they are told. The client connects by
    itself, and again whenever the daemon restarts or falls silent: it then registers
    its KV memory anew and submits again what has no outcome yet. Every method raises
    the client's own error (`decoded.client.errors`) once it has given up.

    `endpoint`: the daemon's engine link, `ipc:///path` or `tcp://host:port`.
    `engine_id`, `role`, `rank`, `world_size`: whose client this is; a scheduler submits,
    a worker registers KV memory. `subscribe`: outcomes are wanted here; a scheduler
    without them gets no more than refusals, and nothing of it is submitted again after
    a reconnect. `expect_workers` (scheduler): each outcome is kept until every worker
    rank has it too. `tp_size`, `pcp_size`, `dcp_size`: for the proxy. `name`: shown by
    the daemon. `limits`: see `Limits`.

    Raises ValueError for arguments that cannot be. Call `close`, or use it in a `with`.
    """

    def __init__(
        self,
        endpoint: str,
        engine_id: str,
        role: Role = "scheduler",
        rank: int = 0,
        world_size: int = 1,
        subscribe: bool = True,
        expect_workers: bool = False,
        *,
        tp_size: int | None = None,
        pcp_size: int = 1,
        dcp_size: int = 1,
        name: str = "",
        limits: Limits | None = None,
    ) -> None:
        hello = make_hello(
            engine_id,
            role,
            rank,
            world_size,
            subscribe,
            expect_workers,
            tp_size,
            pcp_size,
            dcp_size,
            name or f"python sync, pid {os.getpid()}",
        )
        self.endpoint = endpoint
        self._driver = Driver(endpoint, hello, limits)
        self._session = self._driver.session
        # Guards the driver; held for moments, never while waiting. Whoever has something
        # to send does so under it: a hop to the I/O thread would cost as much as a
        # fourth of the round trip. (A ZMQ socket may be used by several threads as long
        # as a lock is between them.)
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._outcomes: deque[Outcome] = deque()
        self._answers: dict[int, Answer] = {}
        self._error: errors.ClientError | None = None
        self._linger_s = 0.0
        # The socket's descriptor is in `_epoll`, the I/O thread's, unless one caller
        # waits for outcomes: it then polls it in the thread's place.
        self._reader: int | None = None
        self._reader_wake = _eventfd(self)
        self._look_at = 0.0
        self._sleeps_until = 0.0
        self._wake = _eventfd(self)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(self._driver.fd, select.EPOLLIN)
        self._thread = threading.Thread(
            target=self._main, name=f"decoded-client-{engine_id}", daemon=True
        )
        self._thread.start()
        _clients.add(self)

    # Requests

    def submit(self, *submissions: Submission) -> None:
        """Submit requests; all of them are taken, or none. Does not block.

        Each ends with one outcome. Before there is a connection they are kept. Raises
        InvalidSubmission, DuplicateSubmission, ClientOverloaded.
        """
        self._check()
        if self._session.hello.role != "scheduler":
            raise errors.ClientError("a worker cannot submit; the engine's scheduler does")
        prepared = prepare(submissions)
        with self._lock:
            self._session.submit(prepared)
            self._pump()

    def cancel(self, request_id: str, attempt: int | None = None) -> None:
        """Ask for a request's blocks back (None: all its attempts). Does not block.

        They are the engine's again with the outcome, which still comes. No effect on a
        request that has its outcome, or was never submitted here.
        """
        self._check()
        with self._lock:
            self._session.cancel(request_id, attempt)
            self._pump()

    def poll(self) -> list[Outcome]:
        """The outcomes that have arrived, in order; each is returned once. Never blocks."""
        queue = self._outcomes
        if not queue:
            if self._error is not None:
                self._check()
            if time.monotonic() >= self._look_at:
                self._look()
            if not queue:
                return []
        outcomes: list[Outcome] = []
        try:
            while True:
                outcomes.append(queue.popleft())
        except IndexError:
            return outcomes

    def wait(self, timeout_s: float | None = None) -> list[Outcome]:
        """Like `poll`, but waits for the first outcome; empty when the time is over."""
        if self._outcomes or (timeout_s is not None and timeout_s <= 0):
            return self.poll()
        self._check()
        due = None if timeout_s is None else time.monotonic() + timeout_s
        leads = False
        try:
            with self._lock:
                if self._reader is not None:
                    self._arrived.wait_for(lambda: self._outcomes or self._error, timeout_s)
                elif self._error is None:
                    leads = True
                    self._reader = threading.get_ident()
                    self._epoll.unregister(self._driver.fd)
            if leads:
                self._read_until(due)
        finally:
            if leads:
                with self._lock:
                    self._reader = None
                    if self._error is None:
                        self._epoll.register(self._driver.fd, select.EPOLLIN)
        return self.poll()

    @property
    def pending(self) -> int:
        """How many submissions have no outcome yet."""
        return len(self._session.pending)

    # KV memory

    def register_kv(
        self,
        memory: KvMemory,
        side_channel_port: int | None = None,
        timeout_s: float = 60.0,
    ) -> Registration:
        """Have the daemon receive into this worker's KV memory, in place of any before.

        Stays in force until `unregister_kv` or `close`: a restarted daemon gets it again,
        which shows in `registration`. `side_channel_port`: the port wanted for rank 0;
        None lets the daemon choose. Raises RegistrationFailed, NoAnswer.
        """
        self._check()
        with self._lock:
            token = self._session.register(memory, side_channel_port)
            return cast("Registration", self._answer(token, "register_kv", timeout_s))

    def unregister_kv(self, timeout_s: float = 60.0) -> None:
        """Take the memory back; returns when nobody writes to it any more.

        Raises NoAnswer: the memory must then be left alone.
        """
        self._check()
        with self._lock:
            self._answer(self._session.unregister(), "unregister_kv", timeout_s)

    @property
    def registration(self) -> Registration | None:
        """The newest registration; its `generation` changes when the daemon restarted."""
        return self._session.registration

    # The daemon

    def status(
        self,
        request_id: str | None = None,
        engine_id: str | None = None,
        limit: int = 100,
        timeout_s: float = 10.0,
    ) -> dict[str, Any]:
        """What the daemon is doing (docs/protocol.md has the keys). Raises NoAnswer."""
        self._check()
        with self._lock:
            token = self._session.status(request_id, engine_id, limit)
            return cast("dict[str, Any]", self._answer(token, "status", timeout_s))

    def wait_connected(self, timeout_s: float = 10.0) -> Welcome:
        """Wait for the daemon's welcome. Raises the reason why there is none."""
        self._check()
        with self._arrived:
            self._arrived.wait_for(lambda: self.connected or self._error, timeout_s)
        self._check()
        welcome = self._session.welcome
        if welcome is None or not self.connected:
            raise self._session.no_answer("hello", self.endpoint, timeout_s)
        return welcome

    @property
    def connected(self) -> bool:
        """The session is open, as far as is known."""
        return self._session.up

    @property
    def problem(self) -> errors.ClientError | None:
        """Why the client has no connection, or no registration, while it keeps trying."""
        return self._session.problem

    def close(self, linger_s: float = 0.5) -> None:
        """Say good-bye and stop; the daemon gives up this client's requests and memory.

        Outcomes that have arrived can still be polled.
        """
        if isinstance(self._error, errors.ClientForked):
            return
        with self._lock:
            if self._error is None:
                self._linger_s = linger_s if self._session.up else 0.0
                self._session.bye()
                self._pump()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        _clients.discard(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Under the lock

    def _pump(self) -> None:
        """Do everything that can be done now, and tell those who wait for it."""
        answers: list[tuple[int, Answer]] = []
        error: errors.ClientError | None = None
        try:
            now = time.monotonic()
            earlier_fd = self._driver.fd
            if self._driver.reconnect(now):
                self._move_reader(earlier_fd)
            arrived = self._driver.exchange(now, self._outcomes, answers)
            due = self._session.next_deadline()
            error = self._session.fatal
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
            self._epoll.register(self._driver.fd, select.EPOLLIN)
        elif self._reader != threading.get_ident():
            os.eventfd_write(self._reader_wake, 1)

    def _tell(self) -> None:
        self._arrived.notify_all()
        if self._reader is not None and self._reader != threading.get_ident():
            os.eventfd_write(self._reader_wake, 1)

    def _end(self, error: errors.ClientError) -> None:
        if self._error is None:
            self._error = error
        self._tell()
        os.eventfd_write(self._wake, 1)

    # Waiting

    def _look(self) -> None:
        """Read the socket for the caller of `poll`: in a loop that polls without a pause
        the I/O thread would get the interpreter only every few milliseconds.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._look_at = time.monotonic() + LOOK_EVERY_S
                if self._error is None and self._driver.dealer.readable:
                    self._pump()
            finally:
                self._lock.release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _read_until(self, due: float | None) -> None:
        """Be the one who reads the socket until there is an outcome, or time is over."""
        while not self._outcomes and self._error is None:
            left = None if due is None else due - time.monotonic()
            if left is not None and left <= 0:
                return
            poller = select.poll()
            poller.register(self._driver.fd, select.POLLIN)
            poller.register(self._reader_wake, select.POLLIN)
            for ready, _ in poller.poll(None if left is None else math.ceil(left * 1000)):
                if ready == self._reader_wake:
                    os.eventfd_read(ready)
            with self._lock:
                if self._error is None:
                    self._pump()

    def _answer(self, token: int, what: str, timeout_s: float) -> Answer:
        """Wait, with the lock held, for a call's answer; raise it if it is an error."""
        self._pump()
        self._arrived.wait_for(lambda: token in self._answers or self._error, timeout_s)
        if token not in self._answers:
            self._check()
            self._session.abandon(token)
            self._pump()
            raise self._session.no_answer(what, self.endpoint, timeout_s)
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
        with self._lock:
            self._end(error)
            self._epoll.close()
            self._driver.dealer.close(self._linger_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._error is not None:
                    return
                self._sleeps_until = 0.0
                self._pump()
                if self._error is not None:
                    return
                due = self._session.next_deadline() or 0.0
                self._sleeps_until = due
            # Not cut short by the rounding of `epoll`, which is down to milliseconds.
            for ready, _ in self._epoll.poll(max(due - time.monotonic() + 0.001, 0.0)):
                if ready == self._wake:
                    os.eventfd_read(ready)


def _eventfd(owner: Client) -> int:
    """Closed with its owner, when no thread can be about to write to it."""
    fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    # Not at exit either: `_at_exit` still uses it.
    weakref.finalize(owner, os.close, fd).atexit = False
    return fd


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork() -> None:
    for client in _clients:
        text = "the client was made before a fork; make one in the child"
        client._error = errors.ClientForked(text)
        client._outcomes = deque()


def _at_exit() -> None:
    for client in list(_clients):
        client.close(linger_s=0.1)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
