"""Layer progress against real ROUTER sockets: never blocking, dropped and counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from decoded.producer.progress import ProgressChannel, PushProgress
from decoded.producer.sockets import Context
from decoded.wire.side_channel import ACK, Layers, decode_request

from .peers import Peer

HOST = "127.0.0.1"


def _layers(first: int) -> Layers:
    return Layers("cmpl-1", 1, "10.0.0.7:20012", first, 1)


@pytest.fixture
def channel(context: Context) -> Iterator[ProgressChannel]:
    channel = ProgressChannel(context, max_peers=2, queue=8)
    yield channel
    channel.close()


def test_layers_arrive_in_order_on_one_socket(context: Context, channel: ProgressChannel) -> None:
    with Peer(context, lambda *_: ACK) as peer:
        heard = []
        for first in range(100):
            assert channel.send(HOST, peer.port, _layers(first))
            heard.append(peer.heard.get(timeout=10))
        assert [decode_request(payload) for _, payload in heard] == [_layers(i) for i in range(100)]
        assert len({identity for identity, _ in heard}) == 1
        assert (channel.sent, channel.dropped) == (100, 0)


def test_what_does_not_fit_the_queue_is_dropped_at_once(
    channel: ProgressChannel, closed_port: int
) -> None:
    taken = [channel.send(HOST, closed_port, _layers(first)) for first in range(50)]
    assert taken[0]
    assert not taken[-1]
    assert channel.sent == sum(taken)
    assert channel.dropped == 50 - sum(taken)


def test_a_full_queue_towards_one_peer_does_not_touch_another(
    context: Context, channel: ProgressChannel, closed_port: int
) -> None:
    while channel.send(HOST, closed_port, _layers(0)):
        pass
    with Peer(context, lambda *_: ACK) as peer:
        assert channel.send(HOST, peer.port, _layers(7))
        assert decode_request(peer.next()) == _layers(7)


def test_sockets_are_bounded(context: Context, channel: ProgressChannel) -> None:
    with (
        Peer(context, lambda *_: ACK) as a,
        Peer(context, lambda *_: ACK) as b,
        Peer(context, lambda *_: ACK) as c,
    ):
        identities = []
        for peer in (a, b, c, a):
            assert channel.send(HOST, peer.port, _layers(0))
            identities.append(peer.heard.get(timeout=10)[0])
        assert identities[0] != identities[3]


def test_an_address_that_is_none_is_dropped(channel: ProgressChannel) -> None:
    assert not channel.send("no host", 1, _layers(0))
    assert channel.dropped == 1


def _told(times: list[float], layers: list[int]) -> list[tuple[int, int]]:
    """(first, count) of what a push tells whose layers are written at these times."""
    clock = iter([moment for moment in times for _ in range(2)])
    now = 0.0

    def tick() -> float:
        nonlocal now
        now = next(clock, now)
        return now

    sent: list[tuple[int, int]] = []

    class Recorder(ProgressChannel):
        def send(self, host: str, port: int, message: Layers) -> bool:
            sent.append((message.first, message.count))
            return True

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context:
        channel = Recorder(context)
        push = PushProgress(
            channel, "h", 1, lambda first, count: Layers("x", 1, "s", first, count), tick
        )
        for layer in layers:
            push.written(layer)
        push.flush()
    return sent


def test_a_slow_push_tells_each_layer() -> None:
    assert _told([0.0, 1.0, 2.0], [0, 1, 2]) == [(0, 1), (1, 1), (2, 1)]


def test_a_fast_push_tells_its_layers_together_and_leaves_none_out() -> None:
    assert _told([0.0] * 20, list(range(10))) == [(0, 1), (1, 9)]


def test_layers_out_of_order_are_told_as_runs() -> None:
    assert _told([0.0] * 20, [0, 2, 3, 1]) == [(0, 1), (2, 2), (1, 1)]
