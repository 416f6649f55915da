from __future__ import annotations

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
def closed_port(context: Context) -> int:
    """A port that nobody listens on."""
    with context.socket(zmq.ROUTER) as router:
        return router.bind_to_random_port("tcp://127.0.0.1")
