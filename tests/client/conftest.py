from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from decoded.client.memory import SharedCaches, plan_layout
from decoded.config.schema import PoolGroup, PoolLayer, PoolTensor
from decoded.testing import DaemonProcess
from decoded.wire import link
from decoded.wire.layout import SharedMemory


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """Memory that a worker may register, as often as it likes."""
    group = PoolGroup(block_size=16, num_blocks=4)
    layer = PoolLayer(name="layer.0", tensors=[PoolTensor(block_len=1024)])
    with SharedCaches.create(plan_layout([group], [layer])) as caches:
        yield caches.memory


QUICK = {"link": {"heartbeat_s": 0.1, "timeout_s": 1.0}}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose sessions notice silence quickly; its folder outlives a restart."""
    with DaemonProcess(QUICK, tmp_path) as running:
        yield running


class Scripted:
    """A ROUTER that answers each message with what `answer` returns."""

    def __init__(self, endpoint: str, answer: Callable[[link.FromClient], list[bytes]]) -> None:
        self.endpoint = endpoint
        self.heard: list[link.FromClient] = []
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(endpoint)
        self._stop, self._stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stopped.bind("inproc://stop")
        self._stop.connect("inproc://stop")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while self._stopped not in dict(poller.poll()):
            identity, frame = self._router.recv_multipart()
            message = link.decode_from_client(frame)
            self.heard.append(message)
            for answer in self._answer(message):
                self._router.send_multipart([identity, answer])

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Scripted]]:
    """Makes one; closed at the end."""
    made: list[Scripted] = []

    def make(answer: Callable[[link.FromClient], list[bytes]]) -> Scripted:
        made.append(Scripted(f"ipc://{tmp_path}/scripted.sock", answer))
        return made[-1]

    yield make
    for each in made:
        each.close()


def virtual(request_id: str, attempt: int = 1) -> link.Submission:
    """Done at once."""
    return link.Submission(
        request_id, f"x-{request_id}", [[1, 2]], 32, attempt=attempt, do_virtual=True
    )


def real(request_id: str) -> link.Submission:
    """Waits, for no rank of the engine is registered."""
    params = {"metaserver": "http://127.0.0.1:9/"}
    return link.Submission(request_id, f"x-{request_id}", [[1]], 16, kv_transfer_params=params)
