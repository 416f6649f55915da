"""A daemon of a few lines, without sockets: one engine, a report log, seats that read it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from decoded.wire import link
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region, SharedMemory

Key = tuple[str, int]

LAYOUT = KvLayout(
    regions=[Region("/kv", 4096)],
    groups=[KvGroup(16, 4)],
    layers=[KvLayer("layer.0", 0, [KvTensor(0, 0, 1024)])],
)
MEMORY = SharedMemory(LAYOUT)

_boots = itertools.count(1)


def submission(request_id: str, attempt: int = 1, external_id: str = "external") -> link.Submission:
    return link.Submission(request_id, external_id, [[1, 2]], 20, attempt=attempt)


@dataclass
class Log:
    """Outcomes from number 1 on; each seat has read and acknowledged so many."""

    name: str
    outcomes: list[link.OutcomeItem] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    acknowledged: dict[str, int] = field(default_factory=dict)


class DaemonModel:
    """Takes a frame of a client, returns the frames that answer it.

    `seat`: which client; a connection is open for it from its hello until `disconnect`.
    The rules are those of the real daemon: docs/protocol.md.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Everything is forgotten; connections are not welcome until they say hello."""
        self.boot = f"boot{next(_boots)}"
        self.log = Log(f"{self.boot}.1")
        self.sessions: dict[str, str] = {}
        self.live: dict[str, link.Submission] = {}
        self.generations: dict[str, int] = {}
        self.registered = 0
        self.refuse_next = 0

    def disconnect(self, seat: str) -> None:
        """The connection is lost; session, requests and registration live on."""
        self.sessions.pop(seat, None)

    def finish(self, request_id: str, state: link.OutcomeState = "done") -> None:
        """A live request ends."""
        one = self.live.pop(request_id)
        item = link.OutcomeItem(request_id, one.external_id, one.attempt, state, state)
        self.log.outcomes.append(item)

    def reports(self, seat: str, limit: int = 100) -> list[bytes]:
        """What the seat has not been sent yet."""
        if seat not in self.sessions:
            return []
        first = self.log.sent.get(seat, 0)
        items = self.log.outcomes[first : first + limit]
        if not items:
            return []
        self.log.sent[seat] = first + len(items)
        return [link.encode(link.Finished(self.log.name, first + 1, items))]

    def take(self, seat: str, frame: bytes) -> list[bytes]:
        """Handle one frame."""
        message = link.decode_from_client(frame)
        if isinstance(message, link.StatusQuery):
            return [link.encode(link.StatusReport(message.token, {"boot": self.boot}))]
        if isinstance(message, link.Hello):
            self.sessions[seat] = message.session
            self.log.sent[seat] = self.log.acknowledged.get(seat, 0)
            welcome = link.Welcome(
                link.PROTOCOL_VERSION,
                "model",
                self.boot,
                self.log.name,
                heartbeat_s=1.0,
                timeout_s=10.0,
                generation=self.generations.get(seat),
            )
            return [link.encode(welcome)]
        if seat not in self.sessions:
            token = getattr(message, "token", None)
            kind = str(message.__struct_config__.tag)
            return [link.encode(link.Error("hello_required", "say hello", kind, token))]
        return [link.encode(answer) for answer in self._answers(seat, message)]

    def _answers(self, seat: str, message: link.FromClient) -> list[link.FromDaemon]:
        if isinstance(message, link.Heartbeat):
            return [message]
        if isinstance(message, link.Acknowledge):
            if message.log == self.log.name:
                known = self.log.acknowledged.get(seat, 0)
                assert message.seq <= len(self.log.outcomes)
                self.log.acknowledged[seat] = max(known, message.seq)
        elif isinstance(message, link.Submit):
            return self._submit(message)
        elif isinstance(message, link.Cancel):
            for item in message.requests:
                live = self.live.get(item.request_id)
                if live is not None and item.attempt in (None, live.attempt):
                    self.finish(item.request_id, "cancelled")
        elif isinstance(message, link.RegisterKv):
            self.registered += 1
            self.generations[seat] = self.registered
            return [link.KvRegistered(message.token, self.registered, "127.0.0.1", 20000, LAYOUT)]
        elif isinstance(message, link.UnregisterKv):
            self.generations.pop(seat, None)
            return [link.KvUnregistered(message.token)]
        elif isinstance(message, link.Bye):
            self.disconnect(seat)
        return []

    def _submit(self, message: link.Submit) -> list[link.FromDaemon]:
        refusals = []
        for one in message.requests:
            live = self.live.get(one.request_id)
            if (live is not None and live.attempt == one.attempt) or self._unread(one):
                continue
            if live is not None or self.refuse_next:
                self.refuse_next = max(self.refuse_next - 1, 0)
                refusals.append(link.Refusal(one.request_id, one.attempt, "too_many_requests"))
            else:
                self.live[one.request_id] = one
        return [link.Refused(refusals)] if refusals else []

    def _unread(self, one: link.Submission) -> bool:
        """It ended, and the scheduler has not acknowledged that: a repeat."""
        first = self.log.acknowledged.get("scheduler", 0)
        return any(
            (item.request_id, item.attempt) == (one.request_id, one.attempt)
            for item in self.log.outcomes[first:]
        )
