"""The client's side of the engine link, without sockets and without a clock.

A shell (`sync`, `aio`) owns the socket and the time and does, whenever something
happened:

1. `wants_connection(now)`: open a new socket in place of the old, then `connected(now)`;
2. `receive(frame, now)` for each frame that came, then `tick(now)`;
3. hand over `take_outcomes()` and `take_answers()`, then send `take_frames()`, in this
   order: only what was taken is acknowledged;
4. come back at `next_deadline()`, or when the caller did something.

Frames never outlive their connection: what matters is sent again on the next.
"""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from decoded.wire import link
from decoded.wire.layout import KvMemory

from . import errors
from .outcomes import Gap, Key, LogReader, Outcome, refused, reported
from .pacing import Limits, Pace
from .registration import RETRIED, Registration, Wish
from .submissions import Outbox, Pending, Prepared

Answer = Registration | dict[str, Any] | errors.ClientError | None
"""What a call got: `register` a Registration, `unregister` None, `status` a dict, or an error."""

MAX_UNACKNOWLEDGED = 256
"""So many outcomes are acknowledged at once."""


class Phase(enum.Enum):
    """Where a session stands."""

    WAITING = "waiting to connect"
    GREETING = "waiting for the daemon's welcome"
    UP = "connected"
    OVER = "closed"


class Session:
    """One client's conversation with the daemon; see the module's text for its use.

    `hello` says who the client is; its `session` is the same as long as the client
    lives. `jitter` returns numbers in 0..1.
    """

    def __init__(
        self,
        hello: link.Hello,
        limits: Limits | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.hello = hello
        self.limits = limits or Limits()
        self.phase = Phase.WAITING
        self.welcome: link.Welcome | None = None
        self.problem: errors.ClientError | None = None
        """Why the session is not up, or its registration lost, while it still tries."""
        self.fatal: errors.ClientError | None = None
        """Why it gave up."""
        self.connections = 0
        self._outbox = Outbox(self.limits.max_pending, keep=hello.subscribe)
        self._pace = Pace(self.limits, jitter)
        self._reader = LogReader(self.limits.remember)
        self._wish = Wish()
        self._disown = False
        self._calls: dict[int, link.FromClient] = {}
        self._tokens = itertools.count(1)
        self._connect_at = float("-inf")
        self._up_since = self._heard_at = self._due_at = 0.0
        self._heartbeat_s, self._timeout_s = 1.0, 10.0
        self._frames: list[bytes] = []
        self._outcomes: list[Outcome] = []
        self._acknowledge_at: float | None = None
        self._unacknowledged: set[Key] = set()
        self._answers: list[tuple[int, Answer]] = []

    # What the caller asks for

    @property
    def up(self) -> bool:
        """The daemon has welcomed this session, and was heard since."""
        return self.phase is Phase.UP

    @property
    def boot(self) -> str:
        """Which life of the daemon the session is with; empty while there is none."""
        return self.welcome.boot if self.welcome is not None and self.up else ""

    @property
    def pending(self) -> Pending:
        """What has no outcome yet."""
        return self._outbox.pending

    @property
    def registration(self) -> Registration | None:
        """What the daemon served last for this rank; None where that is void by now."""
        return self._wish.current

    def submit(self, submissions: Sequence[Prepared]) -> None:
        """Take all of them, or none. Raises DuplicateSubmission, ClientOverloaded, or why
        the session is over.
        """
        self._check_alive()
        self._outbox.submit(submissions)
        if not self._unacknowledged.isdisjoint(one.key for one in submissions):
            # An ended attempt whose outcome is not acknowledged would make the daemon
            # take a new request of the same id for a repeat.
            self._acknowledge()

    def cancel(self, request_id: str, attempt: int | None = None) -> None:
        """Ask for a request's blocks; without effect if it has its outcome already."""
        self._check_alive()
        known = self._outbox.cancel(request_id, attempt)
        if not known and not self.hello.subscribe and self.phase is Phase.UP:
            self._send(link.Cancel([link.Cancellation(request_id, attempt)]))

    def register(self, memory: KvMemory, side_channel_port: int | None = None) -> int:
        """Have this rank's memory served from now on. Returns the call's token.

        Raises ClientError for a scheduler, or while another call about KV is in flight.
        """
        self._check_kv_call("register_kv")
        return self._call(self._wish.make(next(self._tokens), memory, side_channel_port))

    def unregister(self) -> int:
        """Take the memory back. Returns the call's token; raises like `register`."""
        self._check_kv_call("unregister_kv")
        self._wish.drop()
        return self._call(link.UnregisterKv(next(self._tokens)))

    def status(
        self, request_id: str | None = None, engine_id: str | None = None, limit: int = 100
    ) -> int:
        """Ask what the daemon is doing. Returns the call's token."""
        self._check_alive()
        return self._call(link.StatusQuery(next(self._tokens), engine_id, request_id, limit))

    def abandon(self, token: int) -> None:
        """Nobody waits for this call any more. A registration is taken back."""
        call = self._calls.pop(token, None)
        if isinstance(call, link.RegisterKv):
            self._wish.drop()
            self._disown = True
            if self.phase is Phase.UP:
                self._disown_registration()

    def bye(self) -> None:
        """Leave for good; the daemon gives up what this client had."""
        if self.phase is Phase.UP:
            self._acknowledge()
            self._frames += [*self._outbox.frames(), link.encode(link.Bye())]
        self._end(errors.ClientClosed("the client is closed"))

    # What the shell does

    def wants_connection(self, now: float) -> bool:
        """A new socket is to be opened now."""
        return self.phase is Phase.WAITING and now >= self._connect_at

    def connected(self, now: float) -> None:
        """A new socket is there; what was on the old one is void."""
        self.connections += 1
        self._frames.clear()
        self._greet(now)
        for call in self._calls.values():
            if isinstance(call, link.StatusQuery):
                self._send(call)

    def receive(self, frame: bytes | memoryview, now: float) -> None:
        """Take one frame of the daemon."""
        if self.phase in (Phase.WAITING, Phase.OVER):
            return
        self._heard_at = now
        try:
            message = link.decode_from_daemon(frame)
        except link.WireError as error:
            if error.code != "unknown_kind":
                self._end(errors.ProtocolFault(error.code, f"the daemon sent: {error}"))
            return
        if self.phase is Phase.UP and now - self._up_since >= self._heartbeat_s:
            self._pace.failures = 0
        if isinstance(message, link.Finished):
            self._finished(message, now)
        elif isinstance(message, link.Refused):
            self._refused(message)
        elif isinstance(message, link.Welcome):
            self._welcomed(message, now)
        elif isinstance(message, link.KvRegistered):
            self._registered(message)
        elif isinstance(message, link.KvUnregistered):
            self._answer(message.token, None)
        elif isinstance(message, link.StatusReport):
            self._answer(message.token, message.status)
        elif isinstance(message, link.Error):
            self._error(message, now)

    def tick(self, now: float) -> None:
        """Do what is due by now."""
        if self.phase is Phase.GREETING and now >= self._due_at:
            waited = f"no welcome from the daemon in {self.limits.welcome_s:g} s"
            self._down(now, errors.NoAnswer(f"{waited}; is it running?"))
        elif self.phase is Phase.UP:
            if now >= self._heard_at + self._timeout_s:
                silence = f"nothing heard from the daemon for {self._timeout_s:g} s"
                self._down(now, errors.NoAnswer(silence))
                return
            if now >= self._due_at:
                self._send(link.Heartbeat())
                self._due_at = now + self._heartbeat_s
            if self._acknowledge_at is not None and now >= self._acknowledge_at:
                self._acknowledge()
            if self._wish.retry_at is not None and now >= self._wish.retry_at:
                self._send_wish()

    def next_deadline(self) -> float | None:
        """When `tick` or `wants_connection` is due; None when the session is over."""
        if self.phase is Phase.OVER:
            return None
        if self.phase is Phase.WAITING:
            return self._connect_at
        if self.phase is Phase.GREETING:
            return self._due_at
        due = min(self._due_at, self._heard_at + self._timeout_s)
        for other in (self._acknowledge_at, self._wish.retry_at):
            if other is not None and other < due:
                due = other
        return due

    def take_outcomes(self) -> list[Outcome]:
        """Outcomes for the application, which has them from now on: they will be acknowledged."""
        outcomes, self._outcomes = self._outcomes, []
        self._reader.take()
        if len(self._unacknowledged) >= MAX_UNACKNOWLEDGED:
            self._acknowledge()
        return outcomes

    def take_answers(self) -> list[tuple[int, Answer]]:
        """Calls that ended, by token."""
        answers, self._answers = self._answers, []
        return answers

    def take_frames(self) -> list[bytes]:
        """What to send, in order."""
        frames, self._frames = self._frames, []
        if self.phase is Phase.UP:
            frames += self._outbox.frames()
        return frames

    def no_answer(self, what: str, endpoint: str, timeout_s: float) -> errors.NoAnswer:
        """The error for a call that nobody answered, with what is known about why."""
        why = f": {self.problem}" if self.problem is not None else ""
        text = f"no answer to {what} from the daemon at {endpoint} in {timeout_s:g} s"
        return errors.NoAnswer(f"{text} ({self.phase.value}{why})")

    # Connecting

    def _greet(self, now: float) -> None:
        self.phase = Phase.GREETING
        self._due_at = now + self.limits.welcome_s
        self._send(self.hello)

    def _greet_again(self, now: float, problem: errors.ClientError) -> None:
        """The daemon knows nothing of us, or we of it: at once, but not in a circle."""
        if self._pace.failures == 0:
            self._pace.failures = 1
            self._greet(now)
        else:
            self._down(now, problem)

    def _down(self, now: float, problem: errors.ClientError) -> None:
        pace = self._pace
        said_no = isinstance(problem, errors.DaemonError)
        self.phase, self.problem = Phase.WAITING, problem
        self._frames.clear()
        self._connect_at = now + pace.wait() if pace.failures or said_no else now
        pace.failures += 1
        if not said_no:
            pace.accepted()
        elif pace.refused(now):
            self._end(problem)

    def _welcomed(self, message: link.Welcome, now: float) -> None:
        if self.phase is not Phase.GREETING:
            return
        if message.protocol != link.PROTOCOL_VERSION:
            text = f"the daemon speaks protocol {message.protocol}, this client"
            text = f"{text} {link.PROTOCOL_VERSION}; upgrade the older one"
            self._end(errors.UnsupportedProtocol("unsupported_protocol", text))
            return
        self.phase, self.welcome = Phase.UP, message
        self.problem = None
        self._pace.accepted()
        self._heartbeat_s = max(message.heartbeat_s, 0.01)
        self._timeout_s = max(message.timeout_s, 0.01)
        self._up_since = now
        self._due_at = now + self._heartbeat_s
        # Before any submit, for the same reason as in `submit`.
        self._reader.welcomed(message.log)
        self._acknowledge()
        if self._wish.is_void(message.boot):
            self._wish.drop()
        if self._wish.missing(message.boot, message.generation):
            self._send_wish()
        elif self._disown and message.generation is not None and self._wish.token is None:
            self._disown_registration()
        for call in self._calls.values():
            if isinstance(call, link.UnregisterKv):
                self._send(call)
        self._outbox.again()

    # What the daemon says

    def _finished(self, message: link.Finished, now: float) -> None:
        if self.phase is not Phase.UP:
            return
        try:
            items = self._reader.read(message)
        except Gap as gap:
            self._greet_again(now, errors.ProtocolFault("invalid", f"finished: {gap}"))
            return
        if self._acknowledge_at is None:
            self._acknowledge_at = now + self.limits.acknowledge_s
        submits = self.hello.role == "scheduler"
        for item in items:
            key = Key(item.request_id, item.attempt)
            known = self.pending.pop(key) is not None if submits else self._reader.first_time(key)
            if known:
                self._unacknowledged.add(key)
                self._outcomes.append(reported(item))

    def _refused(self, message: link.Refused) -> None:
        for item in message.requests:
            one = self.pending.pop(Key(item.request_id, item.attempt))
            if one is not None or not self.hello.subscribe:
                self._outcomes.append(refused(item, "" if one is None else one.external_id))

    def _registered(self, message: link.KvRegistered) -> None:
        if message.token == self._wish.token and self.welcome is not None:
            if isinstance(self.problem, errors.RegistrationFailed):
                self.problem = None
                self._pace.accepted()
            self._answer(message.token, self._wish.came_true(message, self.welcome.boot))

    def _error(self, message: link.Error, now: float) -> None:
        error = errors.daemon_error(message.code, message.message, message.about)
        if message.code == "hello_required":
            if self.phase is Phase.UP:
                self._greet_again(now, error)
        elif self.phase is Phase.GREETING and message.code in ("seat_taken", "too_many_sessions"):
            self._down(now, error)
        elif message.token is None:
            self._end(error)
        elif message.token == self._wish.token:
            self._registration_failed(message.token, error, now)
        else:
            self._answer(message.token, error)

    def _registration_failed(self, token: int, error: errors.DaemonError, now: float) -> None:
        """A first registration fails its call; one that the daemon had is tried again."""
        first = token in self._calls
        passing = error.code in RETRIED and (self._wish.repeated or not first)
        if passing and not self._pace.refused(now):
            self.problem = error
            self._wish.retry_at = now + max(self._pace.wait(), self.limits.backoff_s)
            return
        self._wish.drop()
        if first:
            self.problem = None
            self._pace.accepted()
            self._answer(token, error)
        else:
            self._end(error)

    # Sending

    def _acknowledge(self) -> None:
        """Tell the daemon what the application has."""
        self._acknowledge_at = None
        self._unacknowledged.clear()
        acknowledge = self._reader.acknowledgement()
        if acknowledge is not None and self.phase is Phase.UP:
            self._send(acknowledge)

    def _send(self, message: link.FromClient) -> None:
        self._frames.append(link.encode(message))

    def _send_wish(self) -> None:
        message = self._wish.message()
        if message is not None:
            self._send(message)

    def _disown_registration(self) -> None:
        """Take back a registration that nobody waited for."""
        self._disown = False
        self._send(link.UnregisterKv(next(self._tokens)))

    # Calls

    def _check_alive(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def _check_kv_call(self, what: str) -> None:
        self._check_alive()
        if self.hello.role != "worker":
            raise errors.ClientError(f"{what} is for workers; this client is a scheduler")
        for call in self._calls.values():
            if isinstance(call, link.RegisterKv | link.UnregisterKv):
                text = f"{what} while another call about KV memory is in flight; wait for it"
                raise errors.ClientError(text)

    def _call(self, message: link.RegisterKv | link.UnregisterKv | link.StatusQuery) -> int:
        self._calls[message.token] = message
        if isinstance(message, link.StatusQuery):
            # Needs no welcome.
            if self.phase in (Phase.GREETING, Phase.UP):
                self._send(message)
        elif self.phase is Phase.UP:
            if isinstance(message, link.RegisterKv):
                self._send_wish()
            else:
                self._send(message)
        return message.token

    def _answer(self, token: int, answer: Answer) -> None:
        if self._calls.pop(token, None) is not None:
            self._answers.append((token, answer))

    def _end(self, error: errors.ClientError) -> None:
        self.phase, self.fatal = Phase.OVER, error
        for token in list(self._calls):
            self._answer(token, error)
