from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq

from decoded.producer.sockets import Context


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that nobody listens on, held so that nobody else takes it meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
