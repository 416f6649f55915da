"""What tests of the daemon's edges share: clients, a side channel peer, and waiting."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import Any, TypeVar

import zmq

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire import side_channel as sc
from decoded.wire.layout import (
    KvGroup,
    KvLayer,
    KvLayout,
    KvTensor,
    Region,
    SharedMemory,
    TransferMemory,
)

HOST = "127.0.0.1"
WAIT_S = 30.0

# Drains and shutdown are short, sessions may be silent for long.
CONFIG: dict[str, Any] = {
    "link": {"heartbeat_s": 0.5, "timeout_s": 60.0},
    "transfer": {"timeout_s": 1.0},
    "deadlines": {"drain_margin_s": 0.1, "shutdown_s": 0.1},
    "metaserver": {"retries": 2, "backoff_s": 0.01},
}

T = TypeVar("T")
_numbers = itertools.count()


def unique(what: str) -> str:
    """A name that no other test of this process uses."""
    return f"{what}-{next(_numbers)}"


def until(probe: Callable[[], T | None], timeout_s: float = WAIT_S) -> T:
    """What `probe` returns once it is true. `probe` asks somebody and waits for the answer."""
    end = time.monotonic() + timeout_s
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < end, "it did not come to that in time"


def barrier(client: BareClient, token: int = 77) -> None:
    """Return once the daemon has taken everything that `client` sent; passes messages over."""
    client.send(wire.Heartbeat(token))
    while client.expect(wire.Heartbeat).token != token:
        pass


def status_of(daemon: DaemonProcess, engine_id: str) -> dict[str, Any] | None:
    """The engine's entry in the daemon's status."""
    engines = daemon.status()["engines"]
    return next((each for each in engines if each["engine_id"] == engine_id), None)


def request_of(daemon: DaemonProcess, engine_id: str, request_id: str) -> dict[str, Any]:
    """The request's entry in the daemon's status, with its story."""
    [found] = daemon.status(engine_id=engine_id, request_id=request_id)["requests"]
    entry: dict[str, Any] = found
    return entry


def outcomes(client: BareClient, count: int) -> list[wire.OutcomeItem]:
    """The next `count` outcomes, acknowledged."""
    found: list[wire.OutcomeItem] = []
    while len(found) < count:
        message = client.expect(wire.Finished, timeout_s=WAIT_S)
        assert message.outcomes
        found += message.outcomes
        client.send(wire.Acknowledge(message.log, message.first + len(message.outcomes) - 1))
    return found


def outcome(client: BareClient) -> wire.OutcomeItem:
    [item] = outcomes(client, 1)
    return item


def virtual(name: str, **fields: Any) -> wire.Submission:
    given = {"do_virtual": True, **fields}
    return wire.Submission(name, f"x-{name}", [[1, 2]], 32, **given)


def real(name: str, url: str, **fields: Any) -> wire.Submission:
    """A request of 40 tokens in blocks 3, 1, 2; `x-<name>` is its external id."""
    given: dict[str, Any] = {"block_ids": [[3, 1, 2]], "prompt_tokens": 40, **fields}
    params = {"do_remote_prefill": True, "metaserver": url}
    return wire.Submission(name, f"x-{name}", kv_transfer_params=params, **given)


def submit(client: BareClient, *requests: wire.Submission) -> None:
    client.send(wire.Submit(list(requests)))


def small_layout(region: str = "kv", blocks: int = 8, group_size: int = 16) -> KvLayout:
    """Two layers of K and V, 512 bytes a block, in one region."""
    size = blocks * 512
    layers = [
        KvLayer(f"layer.{n}", 0, [KvTensor(0, (2 * n + k) * size, 512) for k in (0, 1)])
        for n in (0, 1)
    ]
    return KvLayout([Region(region, 4 * size)], [KvGroup(group_size, blocks)], layers)


def advertised(layout: KvLayout | None = None, port: int = 15_072) -> TransferMemory:
    """Memory whose transfer engine runs elsewhere: the daemon needs none for it."""
    return TransferMemory(layout or small_layout(), port, [0x7F00_0000_0000])


Memory = SharedMemory | TransferMemory


def register(client: BareClient, memory: Any, token: int = 1, **fields: Any) -> wire.KvRegistered:
    client.send(wire.RegisterKv(token, memory, **fields))
    while True:
        answer = client.receive(timeout_s=WAIT_S)
        assert not isinstance(answer, wire.Error), answer
        if isinstance(answer, wire.KvRegistered):
            assert answer.token == token
            return answer


def refused(client: BareClient, memory: Any, token: int = 1, **fields: Any) -> wire.Error:
    """The error that answers a registration."""
    client.send(wire.RegisterKv(token, memory, **fields))
    error = client.expect(wire.Error, timeout_s=WAIT_S)
    assert (error.about, error.token) == ("register_kv", token)
    return error


class Producer:
    """A deployed producer's REQ socket to one side channel."""

    def __init__(self, port: int, kind: int = zmq.REQ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.connect(f"tcp://{HOST}:{port}")

    def ask(self, message: sc.Request) -> bytes:
        return self.ask_raw(sc.encode_request(message))

    def ask_raw(self, *frames: bytes) -> bytes:
        self.socket.send_multipart(frames)
        return self.socket.recv()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()
        self._context.term()


def free_port() -> int:
    with closing(socket.create_server((HOST, 0))) as server:
        port: int = server.getsockname()[1]
        return port


def memory_of(pid: int) -> int:
    """Resident bytes of a process."""
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096
