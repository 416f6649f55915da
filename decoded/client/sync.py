"""The synchronous client: for an engine's own loop, which it never holds up."""

from __future__ import annotations

import os
import weakref
from typing import Any, cast

from decoded.wire.layout import KvMemory
from decoded.wire.link import Submission, Welcome

from . import errors
from .identity import Role, make_hello
from .outcomes import Outcome
from .pacing import Limits
from .registration import Registration
from .submissions import prepare
from .threaded import ThreadedDriver


class Client:
    """A client with an I/O thread of its own.

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
        self._io = ThreadedDriver(endpoint, hello, limits)
        self._session = self._io.session
        self._outcomes = self._io.outcomes
        # Whoever drops a client without closing it must not keep its seat.
        weakref.finalize(self, self._io.abandon).atexit = False

    # Requests

    def submit(self, *submissions: Submission) -> None:
        """Submit requests; all of them are taken, or none. Does not block.

        Each ends with one outcome. Before there is a connection they are kept. Raises
        InvalidSubmission, DuplicateSubmission, ClientOverloaded.
        """
        self._io.check()
        if self._session.hello.role != "scheduler":
            raise errors.ClientError("a worker cannot submit; the engine's scheduler does")
        prepared = prepare(submissions)
        with self._io.lock:
            self._session.submit(prepared)
            self._io.pump()

    def cancel(self, request_id: str, attempt: int | None = None) -> None:
        """Ask for a request's blocks back (None: all its attempts). Does not block.

        They are the engine's again with the outcome, which still comes. No effect on a
        request that has its outcome, or was never submitted here.
        """
        self._io.check()
        with self._io.lock:
            self._session.cancel(request_id, attempt)
            self._io.pump()

    def poll(self) -> list[Outcome]:
        """The outcomes that have arrived, in order; each is returned once. Never blocks."""
        queue = self._outcomes
        if not queue:
            self._io.check()
            self._io.look()
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
        self._io.check()
        self._io.wait(timeout_s)
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
        self._io.check()
        with self._io.lock:
            token = self._session.register(memory, side_channel_port)
            return cast("Registration", self._io.answer(token, "register_kv", timeout_s))

    def unregister_kv(self, timeout_s: float = 60.0) -> None:
        """Take the memory back; returns when nobody writes to it any more.

        Raises NoAnswer: the memory must then be left alone.
        """
        self._io.check()
        with self._io.lock:
            self._io.answer(self._session.unregister(), "unregister_kv", timeout_s)

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
        self._io.check()
        with self._io.lock:
            token = self._session.status(request_id, engine_id, limit)
            return cast("dict[str, Any]", self._io.answer(token, "status", timeout_s))

    def wait_connected(self, timeout_s: float = 10.0) -> Welcome:
        """Wait for the daemon's welcome. Raises the reason why there is none."""
        self._io.check()
        with self._io.arrived:
            self._io.arrived.wait_for(lambda: self.connected or self._io.error, timeout_s)
        self._io.check()
        welcome = self._session.welcome
        if welcome is None or not self.connected:
            raise self._session.no_answer("hello", self.endpoint, timeout_s)
        return welcome

    @property
    def connected(self) -> bool:
        """The session is open, as far as is known."""
        return self._session.up

    @property
    def boot(self) -> str:
        """Which life of the daemon the session is with; empty while there is none.

        After a change, what was written on an earlier life's word may still be under way
        where the worker runs Mooncake itself.
        """
        return self._session.boot

    @property
    def problem(self) -> errors.ClientError | None:
        """Why the client has no connection, or no registration, while it keeps trying."""
        return self._session.problem

    def close(self, linger_s: float = 0.5) -> None:
        """Say good-bye and stop; the daemon gives up this client's requests and memory.

        Outcomes that have arrived can still be polled.
        """
        self._io.close(linger_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
