"""DONE and FAILED against real ROUTER sockets: tries, pauses, new sockets."""

from __future__ import annotations

import threading
import time

import pytest

from decoded.producer.notify import Delivery, NotifySettings, notify
from decoded.producer.sockets import Context
from decoded.wire.side_channel import ACK, Done, Failed, decode_request, encode_error

from .peers import Peer

HOST = "127.0.0.1"
DEPLOYED = NotifySettings()
QUICK = NotifySettings(tries=3, timeout_s=0.4, pause_s=0.02)
DONE = Done("cmpl-1", 2, "10.0.0.7:20012")


def test_deployed_retry_rules_are_the_default() -> None:
    assert (DEPLOYED.tries, DEPLOYED.timeout_s, DEPLOYED.pause_s) == (3, 1.0, 0.1)


@pytest.mark.parametrize("message", [DONE, Failed("cmpl-1", 1, "fd00::7:20012")])
def test_one_try_is_enough(context: Context, message: Done | Failed) -> None:
    with Peer(context, lambda *_: ACK) as peer:
        assert notify(context, HOST, peer.port, message, DEPLOYED) == Delivery(True, 1)
        assert decode_request(peer.next()) == message
        assert peer.heard.empty()


def test_a_silent_peer_hears_it_three_times_from_new_sockets(context: Context) -> None:
    with Peer(context, lambda *_: None) as peer:
        began = time.monotonic()
        delivery = notify(context, HOST, peer.port, DONE, QUICK)
        took = time.monotonic() - began
        assert delivery == Delivery(False, 3, "no answer in 400 ms")
        assert took >= 3 * 0.4 + 2 * 0.02 - 0.01
        heard = [peer.heard.get(timeout=10) for _ in range(3)]
        assert len({identity for identity, _ in heard}) == 3
        assert len({payload for _, payload in heard}) == 1


@pytest.mark.parametrize("garbage", [b"", b"ack", b"ACK\n", encode_error("who are you"), b"\xc1"])
def test_another_answer_is_a_failed_try(context: Context, garbage: bytes) -> None:
    with Peer(context, lambda number, _: ACK if number == 2 else garbage) as peer:
        assert notify(context, HOST, peer.port, DONE, QUICK) == Delivery(True, 3)
    with Peer(context, lambda *_: garbage) as peer:
        delivery = notify(context, HOST, peer.port, DONE, QUICK)
        assert (delivery.acknowledged, delivery.tries) == (False, 3)
        assert "not ACK" in delivery.error


def test_a_late_answer_to_an_earlier_try_is_not_taken_for_this_one(context: Context) -> None:
    release = threading.Event()

    def answer(number: int, payload: bytes) -> bytes:
        if number == 0:
            release.wait(10)
        return ACK

    patient = NotifySettings(tries=2, timeout_s=5.0, pause_s=0.0)
    impatient = NotifySettings(tries=1, timeout_s=0.5)
    with Peer(context, answer) as peer:
        first = notify(context, HOST, peer.port, DONE, impatient)
        release.set()
        second = notify(context, HOST, peer.port, Failed("cmpl-2", 1, "a:1"), patient)
        assert (first.acknowledged, second) == (False, Delivery(True, 1))
        assert [decode_request(peer.next()) for _ in range(2)] == [
            DONE,
            Failed("cmpl-2", 1, "a:1"),
        ]


def test_nobody_there(context: Context, closed_port: int) -> None:
    assert notify(context, HOST, closed_port, DONE, QUICK).tries == 3


def test_an_address_that_is_none(context: Context) -> None:
    delivery = notify(context, "no host", 1, DONE, QUICK)
    assert (delivery.acknowledged, delivery.tries) == (False, 3)
    assert delivery.error


def test_giving_up_ends_the_tries(context: Context, closed_port: int) -> None:
    stop = threading.Event()
    stop.set()
    patient = NotifySettings(tries=3, timeout_s=0.05, pause_s=60.0)
    assert notify(context, HOST, closed_port, DONE, patient, stop).tries == 1
