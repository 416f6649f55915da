"""The side channel of a real daemon, spoken to as deployed producers do and as they never would."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire import side_channel as sc
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region, TransferMemory

from .proxy import Proxy
from .support import (
    CONFIG,
    HOST,
    Producer,
    advertised,
    barrier,
    outcome,
    real,
    register,
    request_of,
    submit,
    unique,
    until,
)

GOLDEN = Path(__file__).parent.parent / "wire" / "golden" / "layerwise_wire.json"
VECTORS: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["vectors"]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(CONFIG) as daemon:
        yield daemon


class DEngine:
    """A D engine of `world_size` ranks with advertised memory, and its side channels."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack, world_size: int = 1) -> None:
        self.name = unique("engine")
        self.scheduler = stack.enter_context(BareClient(daemon.endpoint))
        self.scheduler.hello(self.name, world_size=world_size)
        for rank in range(world_size):
            worker = stack.enter_context(BareClient(daemon.endpoint))
            worker.hello(
                self.name, role="worker", rank=rank, world_size=world_size, session=f"w{rank}"
            )
            self.port = register(worker, advertised()).side_channel_port
        self.producers = [
            stack.enter_context(Producer(self.port + rank)) for rank in range(world_size)
        ]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def engine(daemon: DaemonProcess, stack: ExitStack) -> DEngine:
    return DEngine(daemon, stack)


def is_error(body: bytes) -> str:
    """The text of an answer that a deployed producer takes for a failure."""
    assert body != sc.ACK
    with pytest.raises(sc.SideChannelError) as failure:
        sc.decode_metadata(body)
    text = sc.decode_error(body)
    assert text
    assert text in str(failure.value)
    return text


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["direction"] == "P->D"])
def test_golden_requests_are_answered_as_deployed_producers_expect(
    engine: DEngine, vector: dict[str, Any]
) -> None:
    body = engine.producers[0].ask_raw(bytes.fromhex(vector["payload_hex"]))
    if vector["meaning"]["type"] == "GET_META":
        assert sc.decode_metadata(body).te_rpc_port == 15_072
    else:
        assert body == b"ACK"


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["direction"] == "D->P"])
def test_golden_metadata_goes_out_byte_for_byte_but_for_our_own_key(
    daemon: DaemonProcess, stack: ExitStack, vector: dict[str, Any]
) -> None:
    golden = bytes.fromhex(vector["payload_hex"])
    if "layers" not in vector["meaning"]:
        assert sc.decode_error(golden) or golden == sc.ACK
        return
    layers = vector["meaning"]["layers"]
    groups = max(max(each["tensor_group_idx"]) for each in layers.values()) + 1
    regions: list[Region] = []
    addresses: list[int] = []
    wire_layers: list[KvLayer] = []
    for name, each in layers.items():
        tensors = []
        columns = zip(
            each["kv_caches_base_addr"],
            each["block_len"],
            each["block_size_scale"],
            strict=True,
        )
        for address, length, scale in columns:
            tensors.append(KvTensor(len(regions), 0, length, scale))
            regions.append(Region(f"r{len(regions)}", 4 * length * scale))
            addresses.append(address)
        wire_layers.append(KvLayer(name, each["tensor_group_idx"][0], tensors))
    layout = KvLayout(regions, [KvGroup(16, 4)] * groups, wire_layers)
    worker = stack.enter_context(BareClient(daemon.endpoint))
    worker.hello(unique("golden"), role="worker")
    memory = TransferMemory(layout, vector["meaning"]["te_rpc_port"], addresses)
    port = register(worker, memory).side_channel_port
    body = stack.enter_context(Producer(port)).ask(sc.GetMeta("any"))
    ours = b"\xb0decoded_progress\x01"
    assert body.endswith(ours)
    assert body == bytes([golden[0] + 1]) + golden[1:] + ours


def test_a_dealer_without_a_delimiter_gets_none(engine: DEngine) -> None:
    with Producer(engine.port, zmq.DEALER) as dealer:
        dealer.socket.send(sc.encode_request(sc.Done("x", 1, "p:1")))
        assert dealer.socket.recv_multipart() == [b"ACK"]
        dealer.socket.send_multipart([b"", sc.encode_request(sc.Done("x", 1, "p:1"))])
        assert dealer.socket.recv_multipart() == [b"", b"ACK"]


def test_garbage_is_answered_with_an_error_and_counted(
    daemon: DaemonProcess, engine: DEngine
) -> None:
    chance = random.Random(5)
    before = daemon.status()["counters"].get("side_channel_malformed", 0)
    frames = [chance.randbytes(chance.randrange(1, 300)) for _ in range(200)]
    frames += [b"", b"\xc1", b"\x91" * 60_000, b"\x92\xacget_meta_msg\xa1x", b"\x90"]
    frames += [sc.encode_request(sc.Done("x", 1, "p:1"))[:-1]]
    for frame in frames:
        is_error(engine.producers[0].ask_raw(frame))
    assert daemon.status()["counters"]["side_channel_malformed"] == before + len(frames)
    done = sc.encode_request(sc.Done("x", 1, "p:1"))
    assert "2" in is_error(engine.producers[0].ask_raw(done, done))
    assert engine.producers[0].ask(sc.Done("x", 1, "p:1")) == b"ACK"


def test_a_payload_that_is_too_large_ends_that_connection_only(engine: DEngine) -> None:
    with Producer(engine.port) as large:
        large.socket.send(bytes(70_000))
        assert engine.producers[0].ask(sc.Done("x", 1, "p:1")) == b"ACK"
    with Producer(engine.port) as again:
        assert again.ask_raw(bytes(60_000)) != b"ACK"


def test_raw_bytes_and_silent_connections_keep_nobody_from_being_answered(
    engine: DEngine,
) -> None:
    with ExitStack() as silent:
        for n in range(400):
            raw = silent.enter_context(socket.create_connection((HOST, engine.port)))
            if n % 4 == 1:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif n % 4 == 2:
                raw.sendall(random.Random(n).randbytes(500))
            elif n % 4 == 3:
                raw.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
        with Producer(engine.port) as late:
            assert sc.decode_metadata(late.ask(sc.GetMeta("r"))).progress


def test_a_producer_that_never_reads_costs_little(engine: DEngine, daemon: DaemonProcess) -> None:
    with Producer(engine.port, zmq.DEALER) as deaf:
        deaf.socket.setsockopt(zmq.RCVHWM, 1)
        question = sc.encode_request(sc.GetMeta("r"))
        for _ in range(20_000):
            deaf.socket.send_multipart([b"", question])
        assert engine.producers[0].ask(sc.Done("x", 1, "p:1")) == b"ACK"


def test_a_port_that_no_engine_uses_and_a_rank_without_memory() -> None:
    with DaemonProcess(CONFIG) as own, ExitStack() as stack:
        worker = stack.enter_context(BareClient(own.endpoint))
        worker.hello("e", role="worker", world_size=2, session="w0")
        port = register(worker, advertised()).side_channel_port
        with Producer(port + 1) as producer:
            text = is_error(producer.ask(sc.GetMeta("r")))
            assert "rank 1 of engine e has no KV registered" in text
            assert producer.ask(sc.Done("x", 1, "p:1")) == b"ACK"
        worker.send(wire.UnregisterKv(2))
        worker.expect(wire.KvUnregistered)
        for rank in (0, 1):
            with Producer(port + rank) as producer:
                assert "no engine uses" in is_error(producer.ask(sc.GetMeta("r")))
                assert "no engine uses" in is_error(producer.ask(sc.Done("x", 1, "p:1")))


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


def test_done_before_submit_is_harmless_and_repeats_count_once(
    daemon: DaemonProcess, engine: DEngine, proxy: Proxy
) -> None:
    [producer] = engine.producers
    assert producer.ask(sc.Done("x-r1", 1, "p:1")) == b"ACK"
    submit(engine.scheduler, real("r1", proxy.url))
    call = proxy.next()
    for _ in range(3):
        assert producer.ask(sc.Done("x-r1", 2, "p:1")) == b"ACK"
    found = request_of(daemon, engine.name, "r1")
    assert found["state"] == "receiving"
    assert producer.ask(sc.Done("x-r1", 2, "p:2")) == b"ACK"
    ended = outcome(engine.scheduler)
    assert (ended.state, ended.reason) == ("done", "received")
    assert producer.ask(sc.Done("x-r1", 2, "p:2")) == b"ACK"
    call.answer()
    barrier(engine.scheduler)
    assert request_of(daemon, engine.name, "r1")["state"] == "done"


def test_two_ranks_need_both_senders_each(
    daemon: DaemonProcess, stack: ExitStack, proxy: Proxy
) -> None:
    engine = DEngine(daemon, stack, world_size=2)
    submit(engine.scheduler, real("r", proxy.url))
    body = proxy.next().body
    assert (body["remote_port"], body["remote_tp_size"]) == (engine.port, 2)
    for rank, sender in [(0, "p:1"), (0, "p:2"), (1, "p:1")]:
        assert engine.producers[rank].ask(sc.Done("x-r", 2, sender)) == b"ACK"
        assert request_of(daemon, engine.name, "r")["state"] == "receiving"
    assert engine.producers[1].ask(sc.Done("x-r", 2, "p:2")) == b"ACK"
    assert outcome(engine.scheduler).state == "done"


def test_failed_waits_for_the_other_sender_then_ends(
    daemon: DaemonProcess, engine: DEngine, proxy: Proxy
) -> None:
    [producer] = engine.producers
    submit(engine.scheduler, real("r", proxy.url))
    proxy.next()
    assert producer.ask(sc.Failed("x-r", 2, "p:1")) == b"ACK"
    assert request_of(daemon, engine.name, "r")["state"] == "draining"
    assert producer.ask(sc.Done("x-r", 2, "p:2")) == b"ACK"
    ended = outcome(engine.scheduler)
    assert (ended.state, ended.reason) == ("failed", "sender_failed")
    assert "p:1" in ended.detail


def test_layer_progress_is_acknowledged_and_shown(
    daemon: DaemonProcess, engine: DEngine, proxy: Proxy
) -> None:
    submit(engine.scheduler, real("r", proxy.url))
    proxy.next()
    with Producer(engine.port, zmq.DEALER) as dealer:
        for first in (0, 1, 1):
            message = sc.Layers("x-r", 1, "p:1", first, 1)
            dealer.socket.send_multipart([b"", sc.encode_request(message)])
            assert dealer.socket.recv_multipart() == [b"", b"ACK"]
    [rank] = request_of(daemon, engine.name, "r")["ranks"]
    assert rank["senders"] == [{"sender": "p:1", "state": "pushing", "layers_in": 2}]
    engine.scheduler.send(wire.Bye())
    until(lambda: request_of(daemon, engine.name, "r")["state"] == "draining")
