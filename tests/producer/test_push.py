"""Pushes between two processes over real Mooncake, every byte of D's memory compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from decoded.kv.regions import SharedRegion
from decoded.producer import (
    HandshakeError,
    PlanError,
    Producer,
    ProducerSettings,
    PushError,
    PushRequest,
    RemoteParams,
)
from decoded.producer.handshake import HandshakeSettings
from decoded.producer.notify import NotifySettings
from decoded.producer.sockets import Context
from decoded.wire.layout import KvGroup, KvLayout
from decoded.wire.side_channel import (
    ACK,
    Done,
    Failed,
    GetMeta,
    LayerMetadata,
    Layers,
    Metadata,
    decode_request,
    encode_error,
    encode_metadata,
)

from .d_node import HOST, DNode
from .memory import copied, make_layout, region_for
from .peers import Peer

GROUPS = [KvGroup(block_size=16, num_blocks=24)]
LAYOUT = make_layout(GROUPS, [0, 0, 0], [512, 256])
QUICK = ProducerSettings(
    handshake=HandshakeSettings(poll_s=0.2, polls=2),
    notify=NotifySettings(tries=2, timeout_s=0.4, pause_s=0.01),
)


@dataclass
class Pair:
    """A P rank in this process and a D rank in another."""

    producer: Producer
    d_node: DNode
    layout: KvLayout
    remote_layout: KvLayout
    source: SharedRegion
    target: SharedRegion

    def seen(self) -> bytes:
        return bytes(self.target.buffer)

    def expect(
        self,
        local_blocks: Sequence[Sequence[int]],
        remote_blocks: Sequence[Sequence[int]],
        starts: Sequence[int],
        before: bytes,
    ) -> bytes:
        return copied(
            self.layout,
            bytes(self.source.buffer),
            self.remote_layout,
            before,
            local_blocks,
            remote_blocks,
            starts,
        )


@contextmanager
def _pair(layout: KvLayout, progress: bool = True, **options: Any) -> Iterator[Pair]:
    with (
        region_for(layout, seed=1) as source,
        region_for(layout) as target,
        DNode(target, layout, progress) as d_node,
        Producer(layout, [source.address], host=HOST, **options) as producer,
    ):
        yield Pair(producer, d_node, layout, layout, source, target)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with _pair(LAYOUT) as pair:
        yield pair


def _params(port: int, remote_blocks: list[list[int]], **change: Any) -> RemoteParams:
    given: dict[str, Any] = {
        "request_id": "cmpl-1",
        "remote_block_ids": remote_blocks,
        "remote_block_size": [16] * len(remote_blocks),
        "remote_engine_id": "engine-d",
        "remote_host": HOST,
        "remote_port": port,
        "remote_tp_size": 1,
        "remote_cached_tokens": 0,
    }
    return RemoteParams(**given | change)


def test_a_prompt_with_a_cached_prefix_and_scattered_blocks(pair: Pair) -> None:
    local, remote = [[3, 4, 5, 9, 1]], [[7, 20, 21, 22, 2]]
    params = _params(pair.d_node.port, remote, remote_cached_tokens=20)
    push = pair.producer.open(PushRequest(params, 70, local, "cmpl-1-0a1b2c3d"))
    assert pair.d_node.next() == GetMeta("cmpl-1-0a1b2c3d")
    before = pair.seen()
    for index in range(3):
        push.layer(index)
    result = push.finish(30)
    assert (result.state, result.acknowledged, result.detail) == ("done", True, "")
    assert (result.layers, result.nbytes) == (3, 3 * 4 * 768)
    assert pair.seen() == pair.expect(local, remote, [1], before)
    done = Done("cmpl-1", 1, pair.producer.sender)
    heard: list[object] = []
    told: list[int] = []
    while done not in heard or told != [0, 1, 2]:
        heard.append(message := pair.d_node.next())
        if isinstance(message, Layers):
            heard.pop()
            assert (message.external_id, message.trans_count) == ("cmpl-1", 1)
            assert message.sender == pair.producer.sender
            told += range(message.first, message.first + message.count)
    assert heard == [done]
    assert pair.d_node.rest() == []
    assert pair.producer.pushes_open == 0


def test_two_groups_with_kernel_blocks_towards_a_deployed_d_node() -> None:
    groups = [KvGroup(16, 10), KvGroup(32, 6)]
    layout = make_layout(groups, [0, 1, 0, 1], [128, 64], scale=2)
    with _pair(layout, progress=False) as pair:
        local, remote = [[5, 6, 7], [2, 1]], [[1, 2, 9], [3, 5]]
        params = _params(pair.d_node.port, remote, remote_block_size=[16, 32])
        push = pair.producer.open(PushRequest(params, 33, local))
        before = pair.seen()
        for layer in layout.layers:
            push.layer(layer.name)
        assert push.finish(30).state == "done"
        assert pair.seen() == pair.expect(local, remote, [0, 0], before)
        assert pair.d_node.rest() == [GetMeta("cmpl-1"), Done("cmpl-1", 1, pair.producer.sender)]


def test_chunked_prefill_sends_whole_blocks_and_the_rest_with_the_last_chunk(pair: Pair) -> None:
    remote = [[2, 3, 8, 5]]
    push = pair.producer.open(PushRequest(_params(pair.d_node.port, remote), 60, [[10, 11]]))
    snapshots = [pair.seen()]

    def chunk(computed: int) -> None:
        for index in range(3):
            push.layer(index, computed, ready=lambda: snapshots.append(pair.seen()))

    chunk(24)
    push.add_blocks([[4]])
    chunk(48)
    chunk(55)  # no whole block more: nothing is queued
    push.add_blocks([[23]])
    chunk(60)
    assert push.finish(30).state == "done"
    local = [[10, 11, 4, 23]]
    after_first = pair.expect([[10]], [[2]], [0], snapshots[0])
    after_second = pair.expect([[10, 11, 4]], [[2, 3, 8]], [0], snapshots[0])
    assert len(snapshots) == 1 + 9
    assert snapshots[4] == after_first
    assert snapshots[7] == after_second
    assert pair.seen() == pair.expect(local, remote, [0], snapshots[0])
    told: list[int] = []
    while told != [0, 1, 2]:
        message = pair.d_node.next()
        if isinstance(message, Layers):
            told += range(message.first, message.first + message.count)


def test_two_p_ranks_share_the_blocks_of_one_d_rank() -> None:
    whole = make_layout(GROUPS, [0, 0, 0], [1024, 512])
    local, remote = [[[4, 5, 1]], [[8, 2, 3]]], [[6, 7, 9]]
    with (
        region_for(LAYOUT, seed=1) as one,
        region_for(LAYOUT, seed=2) as two,
        region_for(whole) as target,
        DNode(target, whole) as d_node,
    ):
        before = expected = bytes(target.buffer)
        senders = set()
        for rank, source in enumerate((one, two)):
            producer = Producer(LAYOUT, [source.address], host=HOST, tp_rank=rank, tp_size=2)
            with producer:
                request = PushRequest(_params(d_node.port, remote), 48, local[rank])
                push = producer.open(request)
                for index in range(3):
                    push.layer(index)
                assert push.finish(30).state == "done"
                senders.add(producer.sender)
            content = bytes(source.buffer)
            expected = copied(LAYOUT, content, whole, expected, local[rank], remote, [0], part=rank)
        seen = bytes(target.buffer)
        # The connect write: 128 bytes from P's block 0 at the base of the first layer.
        assert seen[:128] == bytes(two.buffer[:128]) != before[:128]
        assert seen[128:] == expected[128:]
        done = [message for message in d_node.rest() if isinstance(message, Done)]
        assert {message.sender for message in done} == senders
        assert [message.trans_count for message in done] == [2, 2]
        assert len(senders) == 2


def test_of_ranks_with_the_same_bytes_one_sends() -> None:
    with _pair(LAYOUT, tp_rank=1, tp_size=2) as pair:
        push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
        before = pair.seen()
        for index in range(3):
            push.layer(index)
        assert push.finish(30).state == "silent"
        assert pair.seen() == before
        assert pair.d_node.rest() == [GetMeta("cmpl-1")]


def test_the_second_push_asks_for_nothing(pair: Pair) -> None:
    for number in range(2):
        params = _params(pair.d_node.port, [[1]], request_id=f"cmpl-{number}")
        push = pair.producer.open(PushRequest(params, 5, [[number]]))
        for index in range(3):
            push.layer(index)
        push.finish(30)
    heard = pair.d_node.rest()
    assert [type(message) for message in heard].count(GetMeta) == 1
    assert [type(message) for message in heard].count(Done) == 2


@pytest.mark.parametrize("cached", [16, 17, 32])
def test_nothing_is_said_when_d_holds_the_prompt(pair: Pair, cached: int) -> None:
    params = _params(pair.d_node.port, [[1]], remote_cached_tokens=cached)
    push = pair.producer.open(PushRequest(params, 16, [[3]]))
    before = pair.seen()
    for index in range(3):
        push.layer(index)
    assert push.finish(30).state == "silent"
    assert pair.seen() == before
    assert pair.d_node.rest() == []


def test_nothing_is_said_when_only_the_last_layers_group_is_complete() -> None:
    layout = make_layout([KvGroup(64, 4), KvGroup(16, 4)], [0, 1], [64])
    with _pair(layout, progress=False) as pair:
        params = _params(
            pair.d_node.port, [[2], [3]], remote_block_size=[64, 16], remote_cached_tokens=16
        )
        push = pair.producer.open(PushRequest(params, 16, [[1], [1]]))
        before = pair.seen()
        push.layer(0)
        push.layer(1)
        assert push.finish(30).state == "silent"
        assert pair.seen() == pair.expect([[1], [1]], [[2], [3]], [0, 1], before)
        assert pair.d_node.rest() == [GetMeta("cmpl-1")]


def test_a_failed_write_is_told_and_ends_the_writes(pair: Pair) -> None:
    push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
    push.layer(0)
    assert [type(pair.d_node.next()) for _ in range(2)] == [GetMeta, Layers]
    pair.d_node.fence()
    push.layer(1)
    result = push.outcome.result(60)
    assert (result.state, result.layers, result.acknowledged) == ("failed", 1, True)
    assert "model.layers.1" in result.detail
    push.layer(2)
    assert push.finish(1) == result
    assert pair.d_node.rest() == [Failed("cmpl-1", 1, pair.producer.sender)]


def test_after_a_failed_write_other_d_nodes_are_still_served(pair: Pair) -> None:
    push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
    pair.d_node.next()
    pair.d_node.fence()
    sender = pair.producer.sender
    push.layer(0)
    assert push.outcome.result(60).state == "failed"
    with region_for(LAYOUT) as target, DNode(target, LAYOUT) as other:
        before = bytes(target.buffer)
        params = _params(other.port, [[4]], remote_engine_id="engine-e")
        push = pair.producer.open(PushRequest(params, 5, [[2]]))
        for index in range(3):
            push.layer(index)
        assert push.finish(30).state == "done"
        assert bytes(target.buffer) == pair.expect([[2]], [[4]], [0], before)
        assert Done("cmpl-1", 1, sender) in other.rest()


def test_a_d_node_that_has_stopped_holds_up_no_other(pair: Pair) -> None:
    stuck = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
    pair.d_node.next()
    with region_for(LAYOUT) as target, DNode(target, LAYOUT) as other:
        pair.d_node.stop()
        try:
            for index in range(3):
                stuck.layer(index)
            sealed = stuck.seal()
            params = _params(other.port, [[4]], remote_engine_id="engine-e")
            push = pair.producer.open(PushRequest(params, 5, [[2]]))
            for index in range(3):
                push.layer(index)
            assert push.finish(30).state == "done"
            assert not sealed.done()
        finally:
            pair.d_node.go_on()
        assert sealed.result(60).state == "done"


def test_what_is_queued_behind_a_failed_write_is_not_tried(pair: Pair) -> None:
    """Each would take as long as the first: MC_TRANSFER_TIMEOUT with a D that has stopped."""
    go_on = threading.Event()
    pushes = [
        pair.producer.open(PushRequest(_params(pair.d_node.port, [[n]]), 5, [[n]]))
        for n in (1, 2, 3)
    ]
    pair.d_node.next()
    for push in pushes[:2]:
        push.layer(0, ready=lambda: _wait(go_on))
    pair.d_node.fence()
    go_on.set()
    first, second = (push.outcome.result(60) for push in pushes[:2])
    assert (first.state, second.state) == ("failed", "failed")
    assert "not tried" not in first.detail
    reason = first.detail.partition(": ")[2]
    assert second.detail.endswith(f": not tried, an earlier write failed: {reason}")
    # A later one is tried again: D may be back.
    pushes[2].layer(0)
    assert "not tried" not in pushes[2].outcome.result(60).detail


def test_d_nodes_share_writers_when_there_are_many() -> None:
    settings = ProducerSettings(max_writers=2)
    with ExitStack() as stack:
        source = stack.enter_context(region_for(LAYOUT, seed=1))
        targets = [stack.enter_context(region_for(LAYOUT)) for _ in range(3)]
        nodes = [stack.enter_context(DNode(target, LAYOUT)) for target in targets]
        producer = stack.enter_context(
            Producer(LAYOUT, [source.address], host=HOST, settings=settings)
        )
        go_on = threading.Event()
        pushes = []
        for number, node in enumerate(nodes):
            params = _params(node.port, [[4]], remote_engine_id=f"engine-{number}")
            push = producer.open(PushRequest(params, 5, [[2]]))
            for index in range(3):
                push.layer(index, ready=lambda: _wait(go_on))
            pushes.append(push.seal())
        threads = [t for t in threading.enumerate() if t.name.startswith("decoded-push")]
        assert len(threads) == 2
        go_on.set()
        assert [push.result(60).state for push in pushes] == ["done"] * 3


def test_giving_up_mid_push(pair: Pair) -> None:
    push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1, 2]]), 20, [[1, 2]]))
    entered, go_on = threading.Event(), threading.Event()

    def ready() -> None:
        entered.set()
        assert go_on.wait(30)

    before = pair.seen()
    push.layer(0, ready=ready)
    push.layer(1)
    push.layer(2)
    assert entered.wait(30)
    outcome = push.fail("the engine was stopped")
    assert not outcome.done()
    go_on.set()
    result = outcome.result(30)
    assert (result.state, result.layers) == ("failed", 1)
    assert result.detail == "the engine was stopped"
    written = make_layout(GROUPS, [0], [512, 256])
    content = bytes(pair.source.buffer)
    assert pair.seen() == copied(written, content, written, before, [[1, 2]], [[1, 2]], [0])
    assert push.fail("again").result(1) == result
    assert Failed("cmpl-1", 1, pair.producer.sender) in pair.d_node.rest()


def test_a_device_that_fails_is_told_as_failed(pair: Pair) -> None:
    def ready() -> None:
        raise RuntimeError("stream is broken")

    push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
    push.layer(0, ready=ready)
    result = push.outcome.result(30)
    assert (result.state, result.layers) == ("failed", 0)
    assert "stream is broken" in result.detail


def test_closing_the_producer_fails_what_is_open() -> None:
    with _pair(LAYOUT) as pair:
        push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
        push.layer(0)
        pair.producer.close()
        assert push.outcome.result(0).state == "failed"
        assert Failed("cmpl-1", 1, pair.producer.sender) in pair.d_node.rest()
        with pytest.raises(PushError, match="closed"):
            pair.producer.open(PushRequest(_params(1, [[1]]), 5, [[1]]))


def test_a_d_node_that_never_acknowledges(context: Context) -> None:
    def answer(number: int, payload: bytes) -> bytes | None:
        asks = isinstance(decode_request(payload), GetMeta)
        return encode_metadata(Metadata(1, _metadata(512, 256))) if asks else None

    with (
        Peer(context, answer) as peer,
        region_for(LAYOUT, seed=1) as source,
        Producer(LAYOUT, [source.address], host=HOST, settings=QUICK) as producer,
    ):
        push = producer.open(PushRequest(_params(peer.port, [[1]]), 5, [[1]]))
        result = push.fail("stop").result(30)
        assert (result.state, result.acknowledged) == ("failed", False)
        assert result.detail == "stop; no answer in 400 ms"
        failed = Failed("cmpl-1", 1, producer.sender)
        assert [decode_request(peer.next()) for _ in range(3)] == [
            GetMeta("cmpl-1"),
            failed,
            failed,
        ]


def _metadata(*block_lens: int) -> dict[str, LayerMetadata]:
    count = len(block_lens)
    layer = LayerMetadata([0] * count, [0] * count, list(block_lens), [1] * count)
    return {layer_.name: layer for layer_ in LAYOUT.layers}


def test_ds_own_error_ends_the_handshake_and_is_not_answered(context: Context) -> None:
    with (
        Peer(context, lambda *_: encode_error("rank 0 has no KV registered")) as peer,
        region_for(LAYOUT) as source,
        Producer(LAYOUT, [source.address], host=HOST) as producer,
    ):
        with pytest.raises(HandshakeError, match="rank 0 has no KV registered"):
            producer.open(PushRequest(_params(peer.port, [[1]]), 5, [[1]]))
        producer.close()
        assert decode_request(peer.next()) == GetMeta("cmpl-1")
        assert peer.heard.empty()


def test_memory_that_does_not_fit_is_told_as_failed(context: Context) -> None:
    def answer(number: int, payload: bytes) -> bytes:
        asks = isinstance(decode_request(payload), GetMeta)
        return encode_metadata(Metadata(1, _metadata(512, 512))) if asks else ACK

    with (
        Peer(context, answer) as peer,
        region_for(LAYOUT) as source,
        Producer(LAYOUT, [source.address], host=HOST) as producer,
    ):
        with pytest.raises(PlanError, match="block_len is 256 on P, 512 on D"):
            producer.open(PushRequest(_params(peer.port, [[1]]), 5, [[1]]))
        assert decode_request(peer.next()) == GetMeta("cmpl-1")
        assert decode_request(peer.next()) == Failed("cmpl-1", 1, producer.sender)


@pytest.mark.parametrize(
    ("change", "prompt", "blocks", "error", "text"),
    [
        ({}, 5, [[24]], PushError, r"has blocks 0\.\.23, not all of 24"),
        ({}, 5, [[-1]], PushError, "not all of -1"),
        ({}, 5, [[1], [1]], PushError, "2 lists of blocks for P's 1 KV groups"),
        ({"remote_block_ids": [[1], [1]]}, 5, [[1]], PushError, "D gave 2 lists of blocks"),
        ({"remote_pcp_size": 2}, 5, [[1]], PushError, "context parallel"),
        ({"remote_tp_size": 2}, 5, [[1]], PlanError, "1 is not a multiple of D's 2"),
        ({}, 17, [[1, 2]], PlanError, "D gave 1 blocks of 16 tokens, too few for a prompt of 17"),
        ({"remote_block_size": [32]}, 5, [[1]], PlanError, "16/1 tokens on P, 32/1 on D"),
        ({}, 0, [[]], PushError, "a prompt has at least one token"),
    ],
)
def test_requests_that_cannot_be(
    pair: Pair,
    change: dict[str, Any],
    prompt: int,
    blocks: list[list[int]],
    error: type[Exception],
    text: str,
) -> None:
    params = _params(pair.d_node.port, change.pop("remote_block_ids", [[1]]), **change)
    with pytest.raises(error, match=text):
        pair.producer.open(PushRequest(params, prompt, blocks))
    assert pair.producer.pushes_open == 0


def test_layers_that_cannot_be(pair: Pair) -> None:
    push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1, 2]]), 20, [[1]]))
    with pytest.raises(PushError, match="no layer 3"):
        push.layer(3)
    with pytest.raises(PushError, match="no layer 'x'"):
        push.layer("x")
    with pytest.raises(PushError, match="20 tokens need 2 blocks of KV group 0, P has 1"):
        push.layer(0)
    push.layer(0, 10)
    with pytest.raises(PushError, match="cannot have 9 tokens computed, after 10 and of 20"):
        push.layer(0, 9)
    with pytest.raises(PushError, match="cannot have 21 tokens"):
        push.layer(0, 21)
    with pytest.raises(PushError, match="has blocks"):
        push.add_blocks([[24]])
    push.add_blocks([[2]])
    push.layer(0)
    with pytest.raises(PushError, match="was pushed to its end"):
        push.layer(0)
    with pytest.raises(
        PushError, match=r"2 layers were not pushed .* the first is model\.layers\.1"
    ):
        push.finish()
    push.layer(1)
    push.layer(2)
    assert push.finish(30).state == "done"


def test_waiting_may_time_out_and_go_on(pair: Pair) -> None:
    push = pair.producer.open(PushRequest(_params(pair.d_node.port, [[1]]), 5, [[1]]))
    go_on = threading.Event()
    for index in range(3):
        push.layer(index, ready=lambda: _wait(go_on))
    with pytest.raises(TimeoutError, match="still under way"):
        push.finish(0.01)
    go_on.set()
    assert push.finish(30).state == "done"


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_rank_that_cannot_be() -> None:
    with region_for(LAYOUT) as source, pytest.raises(ValueError, match="no rank 2"):
        Producer(LAYOUT, [source.address], host=HOST, tp_rank=2, tp_size=2)


def test_the_push_thread_starts_with_the_callers_function() -> None:
    threads: list[str] = []
    with region_for(LAYOUT) as source:
        with Producer(
            LAYOUT,
            [source.address],
            host=HOST,
            on_thread_start=lambda: threads.append(threading.current_thread().name),
        ):
            assert [name.startswith("decoded-push") for name in threads] == [True]

        def broken() -> None:
            raise RuntimeError("no device 7")

        with pytest.raises(RuntimeError, match="no device 7"):
            Producer(LAYOUT, [source.address], host=HOST, on_thread_start=broken)
