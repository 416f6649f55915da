"""A session in plain words: the test plays the daemon and moves the clock."""

from __future__ import annotations

from typing import Any

from decoded.client.identity import make_hello
from decoded.client.outcomes import Outcome
from decoded.client.pacing import Limits
from decoded.client.session import Answer, Session
from decoded.wire import link


class Conversation:
    """`now` is the clock; `said` are the messages since the last look."""

    def __init__(self, role: str = "scheduler", subscribe: bool = True, **limits: Any) -> None:
        hello = make_hello("engine", role, 0, 1, subscribe, False, None, 1, 1, "test")  # type: ignore[arg-type]
        self.session = Session(hello, Limits(**limits), jitter=lambda: 0.0)
        self.now = 100.0

    def connect(self) -> list[link.FromClient]:
        """The socket is there."""
        assert self.session.wants_connection(self.now)
        self.session.connected(self.now)
        return self.said()

    def hear(self, message: link.FromDaemon) -> None:
        """The daemon says something."""
        self.session.receive(link.encode(message), self.now)

    def welcome(self, boot: str = "b", log: str = "b.1", generation: int | None = None) -> None:
        self.hear(link.Welcome(link.PROTOCOL_VERSION, "0", boot, log, 1.0, 10.0, generation))

    def up(self, **welcome: Any) -> list[link.FromClient]:
        """Connect and be welcomed; what follows the hello."""
        self.connect()
        self.welcome(**welcome)
        return self.said()

    def finished(self, first: int, *request_ids: str, log: str = "b.1") -> None:
        items = [link.OutcomeItem(one, "x", 1, "done", "received") for one in request_ids]
        self.hear(link.Finished(log, first, items))

    def refuse_call(self, code: str, about: str, token: int | None = None) -> None:
        self.hear(link.Error(code, f"because of {code}", about, token))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.session.tick(self.now)

    def lose(self) -> None:
        """Nothing is heard until the session wants another connection."""
        self.pass_time(10.0)
        self.now = max(self.now, self.session.next_deadline() or 0.0)

    def said(self) -> list[link.FromClient]:
        return [link.decode_from_client(frame) for frame in self.session.take_frames()]

    def outcomes(self) -> list[str]:
        return [outcome.request_id for outcome in self.taken()]

    def taken(self) -> list[Outcome]:
        return self.session.take_outcomes()

    def answers(self) -> dict[int, Answer]:
        return dict(self.session.take_answers())
