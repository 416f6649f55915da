"""What a registration must be, when it counts, and what waits for it. No Mooncake is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest

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
from tests.edges.proxy import Proxy
from tests.edges.support import (
    CONFIG,
    Producer,
    advertised,
    barrier,
    outcome,
    real,
    refused,
    register,
    request_of,
    small_layout,
    status_of,
    submit,
    unique,
    until,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(CONFIG) as daemon:
        yield daemon


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


@pytest.fixture
def worker(daemon: DaemonProcess) -> Iterator[BareClient]:
    with BareClient(daemon.endpoint) as client:
        client.hello(unique("engine"), role="worker", session="w")
        yield client
        client.send(wire.Bye())


def layout_of(*layers: KvLayer, groups: int = 1, size: int = 1 << 16) -> KvLayout:
    return KvLayout([Region("kv", size)], [KvGroup(16, 8)] * groups, list(layers))


BAD_LAYOUTS = {
    "unknown group": (layout_of(KvLayer("here", 1, [KvTensor(0, 0, 512)])), "KV group 1"),
    "unknown region": (layout_of(KvLayer("here", 0, [KvTensor(1, 0, 512)])), "region 1"),
    "past the end": (layout_of(KvLayer("here", 0, [KvTensor(0, 1 << 15, 8192)])), "ends at byte"),
    "twice": (
        layout_of(
            KvLayer("here", 0, [KvTensor(0, 0, 8)]), KvLayer("here", 0, [KvTensor(0, 64, 8)])
        ),
        "two layers",
    ),
    "overlapping": (
        layout_of(KvLayer("here", 0, [KvTensor(0, 0, 8), KvTensor(0, 63, 8)])),
        "overlap",
    ),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
@pytest.mark.parametrize("how", ["shared", "transfer"])
def test_a_bad_layout_is_told_with_the_layers_name(worker: BareClient, how: str, name: str) -> None:
    layout, says = BAD_LAYOUTS[name]
    error = refused(worker, SharedMemory(layout) if how == "shared" else advertised(layout))
    assert error.code == "bad_layout"
    assert says in error.message
    assert "'here'" in error.message
    register(worker, advertised(), token=2)


@pytest.mark.parametrize("addresses", [[0], [0, 1, 2], [2**64 - 1, 0], [2**64 - 1024, 0]])
def test_addresses_that_cannot_be(worker: BareClient, addresses: list[int]) -> None:
    layout = KvLayout(
        [Region("a", 4096), Region("b", 4096)],
        [KvGroup(16, 4)],
        [KvLayer("l", 0, [KvTensor(0, 0, 512), KvTensor(1, 0, 512)])],
    )
    error = refused(worker, TransferMemory(layout, 15_072, addresses))
    assert error.code == "bad_layout"
    assert "regions" in error.message or "'a'" in error.message


def test_what_is_no_registration_at_all_is_answered_with_its_token(worker: BareClient) -> None:
    for memory in ({}, {"source": "cloud"}, {"source": "shared"}, None, 5):
        raw = {"kind": "register_kv", "token": 9, "memory": memory}
        worker.send_raw(msgspec.msgpack.encode(raw))
        error = worker.expect(wire.Error)
        assert (error.code, error.about, error.token) == ("invalid", "register_kv", 9)


def test_ranks_of_one_engine_have_the_same_kv_groups(daemon: DaemonProcess) -> None:
    engine = unique("engine")
    with BareClient(daemon.endpoint) as first, BareClient(daemon.endpoint) as second:
        first.hello(engine, role="worker", rank=0, world_size=2, session="w0")
        second.hello(engine, role="worker", rank=1, world_size=2, session="w1")
        register(first, advertised())
        error = refused(second, advertised(small_layout(group_size=32)))
        assert error.code == "bad_layout"
        assert "rank 1 are not those of rank 0" in error.message
        register(second, advertised(), token=2)
        status = status_of(daemon, engine)
        assert status is not None
        assert status["ready"]


def test_a_failed_rank_takes_nothing_from_the_others(daemon: DaemonProcess) -> None:
    engine = unique("engine")
    bad = BAD_LAYOUTS["twice"][0]
    with ExitStack() as stack:
        workers = [stack.enter_context(BareClient(daemon.endpoint)) for _ in range(4)]
        for rank, worker in enumerate(workers):
            worker.hello(engine, role="worker", rank=rank, world_size=4, session=f"w{rank}")
        for rank, worker in enumerate(workers):
            worker.send(wire.RegisterKv(1, advertised(bad if rank % 2 else None)))
        ports = {workers[n].expect(wire.KvRegistered).side_channel_port for n in (0, 2)}
        for rank in (1, 3):
            assert workers[rank].expect(wire.Error).code == "bad_layout"
            ports.add(register(workers[rank], advertised(), token=2).side_channel_port)
        [port] = ports
        for rank in range(4):
            with Producer(port + rank) as producer:
                sc.decode_metadata(producer.ask(sc.GetMeta("r")))


def test_of_registrations_sent_in_a_row_the_last_one_counts(
    daemon: DaemonProcess, worker: BareClient
) -> None:
    for n in range(20):
        worker.send(wire.RegisterKv(n, advertised(port=16_000 + n)))
    answers: dict[int, object] = {}
    while len(answers) < 20:
        message = worker.receive()
        if isinstance(message, (wire.KvRegistered, wire.Error)):
            assert message.token is not None
            answers[message.token] = message
    last = answers[19]
    assert isinstance(last, wire.KvRegistered)
    with Producer(last.side_channel_port) as producer:
        assert sc.decode_metadata(producer.ask(sc.GetMeta("r"))).te_rpc_port == 16_019


def test_unregistering_withdraws_a_registration_under_way(daemon: DaemonProcess) -> None:
    engine = unique("engine")
    with BareClient(daemon.endpoint) as worker:
        worker.hello(engine, role="worker")
        for token in range(0, 40, 2):
            worker.send(wire.RegisterKv(token, advertised()))
            worker.send(wire.UnregisterKv(token + 1))
        answered: set[int] = set()
        while len(answered) < 40:
            message = worker.receive()
            if isinstance(message, wire.Error):
                assert message.code == "abandoned"
            if isinstance(message, (wire.Error, wire.KvRegistered, wire.KvUnregistered)):
                assert message.token is not None
                answered.add(message.token)
        status = status_of(daemon, engine)
        assert status is not None
        assert (status["ranks"], status["draining_registrations"]) == ([], [])


def test_a_request_before_its_registration_waits_and_then_starts(
    daemon: DaemonProcess, proxy: Proxy
) -> None:
    engine = unique("engine")
    with ExitStack() as stack:
        scheduler, first, second = (
            stack.enter_context(BareClient(daemon.endpoint)) for _ in range(3)
        )
        scheduler.hello(engine, world_size=2)
        submit(scheduler, real("r", proxy.url), real("cancelled", proxy.url))
        scheduler.send(wire.Cancel([wire.Cancellation("cancelled")]))
        assert outcome(scheduler).state == "cancelled"
        for rank, worker in enumerate((first, second)):
            worker.hello(engine, role="worker", rank=rank, world_size=2, session=f"w{rank}")
        port = register(first, advertised()).side_channel_port
        barrier(scheduler)
        assert request_of(daemon, engine, "r")["state"] == "accepted"
        register(second, advertised())
        assert proxy.next().body["request_id"] == "x-r"
        for rank in (0, 1):
            with Producer(port + rank) as producer:
                producer.ask(sc.Done("x-r", 1, "p:1"))
        assert outcome(scheduler).state == "done"
        assert proxy.waiting == 0


def test_a_registration_that_never_comes_ends_the_wait() -> None:
    config = {**CONFIG, "deadlines": {**CONFIG["deadlines"], "registration_s": 0.2}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as scheduler:
        scheduler.hello("e")
        submit(scheduler, real("r", "http://127.0.0.1:1/"))
        ended = outcome(scheduler)
        assert (ended.state, ended.reason) == ("expired", "kv_not_registered")


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ([[3, 1, 8]], "no block 8"),
        ([[3, 1]], "need 3"),
        ([[3, 1, 2], [1, 2, 3]], "2 block lists"),
        ([[3, 3, 2]], "block 3 is twice"),
    ],
)
def test_blocks_that_cannot_be_fail_the_request(
    daemon: DaemonProcess, worker: BareClient, proxy: Proxy, blocks: list[list[int]], says: str
) -> None:
    engine = unique("blocks")
    with BareClient(daemon.endpoint) as scheduler, BareClient(daemon.endpoint) as own:
        scheduler.hello(engine)
        own.hello(engine, role="worker", session="w")
        register(own, advertised())
        submit(scheduler, real("r", proxy.url, block_ids=blocks))
        ended = outcome(scheduler)
        assert (ended.state, ended.reason) == ("failed", "bad_blocks")
        assert says in ended.detail
        assert proxy.waiting == 0


@pytest.mark.parametrize(
    ("blocks", "prompt", "cached"), [([[]], 40, 0), ([[3, 1, 2]], 40, 40), ([[3, 1, 2]], 40, 41)]
)
def test_nothing_to_fetch_is_done_at_once(
    daemon: DaemonProcess, proxy: Proxy, blocks: list[list[int]], prompt: int, cached: int
) -> None:
    with BareClient(daemon.endpoint) as scheduler:
        scheduler.hello(unique("engine"))
        request = real("r", proxy.url, block_ids=blocks, prompt_tokens=prompt, cached_tokens=cached)
        submit(scheduler, request)
        ended = outcome(scheduler)
        assert (ended.state, ended.reason) == ("done", "nothing_to_fetch")
        assert proxy.waiting == 0


def test_several_engines_do_not_disturb_each_other(daemon: DaemonProcess, proxy: Proxy) -> None:
    with ExitStack() as stack:
        engines = []
        for _ in range(5):
            name = unique("engine")
            scheduler = stack.enter_context(BareClient(daemon.endpoint))
            worker = stack.enter_context(BareClient(daemon.endpoint))
            scheduler.hello(name)
            worker.hello(name, role="worker", session="w", subscribe=False)
            port = register(worker, advertised()).side_channel_port
            engines.append((name, scheduler, worker, port))
            submit(scheduler, real("same", proxy.url))
        assert len({port for *_, port in engines}) == len(engines)
        bodies = [proxy.next().body for _ in engines]
        assert {body["remote_port"] for body in bodies} == {port for *_, port in engines}
        with Producer(engines[0][3]) as producer:
            producer.ask(sc.Done("x-same", 1, "p:1"))
        assert outcome(engines[0][1]).state == "done"
        engines[1][2].send(wire.Bye())
        until(lambda: request_of(daemon, engines[1][0], "same")["state"] == "draining")
        for name, *_ in engines[2:]:
            assert request_of(daemon, name, "same")["state"] == "receiving"
        for _, scheduler, worker, _ in engines:
            worker.send(wire.Bye())
            scheduler.send(wire.Bye())
