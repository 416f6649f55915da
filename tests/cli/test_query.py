"""Asking what does not answer as a daemon of this version does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import zmq

from decoded.cli.query import NoDaemonError, ask_status
from decoded.wire import link

Answer = Callable[[bytes], list[bytes]]


@pytest.fixture
def answering() -> Iterator[Callable[[Answer], str]]:
    """A ROUTER that answers one message as it is told; returns its endpoint."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    threads = []

    def start(answer: Answer) -> str:
        router = context.socket(zmq.ROUTER)
        router.linger = 1000
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def work() -> None:
            with router:
                if router.poll(20_000):
                    peer, frame = router.recv_multipart()
                    for reply in answer(frame):
                        router.send_multipart([peer, reply])

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        return f"tcp://127.0.0.1:{port}"

    yield start
    for thread in threads:
        thread.join(30)
    context.term()


def test_an_answer_is_found_among_others(answering: Callable[[Answer], str]) -> None:
    def answer(frame: bytes) -> list[bytes]:
        query = link.decode_from_client(frame)
        assert isinstance(query, link.StatusQuery)
        assert (query.engine_id, query.request_id, query.limit) == ("e", "r", 7)
        others = [link.Heartbeat(), link.StatusReport(query.token + 1, {"old": True})]
        mine = link.StatusReport(query.token, {"version": "9"})
        return [link.encode(message) for message in (*others, mine)]

    endpoint = answering(answer)
    assert ask_status(endpoint, engine_id="e", request_id="r", limit=7, timeout_s=10) == {
        "version": "9"
    }


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 400", "does not speak this version's protocol"),
        (link.encode(link.Error("unknown_kind", "no such message")), "answers: no such message"),
    ],
)
def test_other_answers(answering: Callable[[Answer], str], reply: bytes, said: str) -> None:
    endpoint = answering(lambda frame: [reply])
    with pytest.raises(NoDaemonError, match=said):
        ask_status(endpoint, timeout_s=10)


def test_no_answer(answering: Callable[[Answer], str]) -> None:
    endpoint = answering(lambda frame: [])
    with pytest.raises(NoDaemonError, match=r"within 0\.1 s"):
        ask_status(endpoint, timeout_s=0.1)
