"""The D side's two halves under vLLM's real scheduler, against a real daemon."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import zmq

from decoded.testing import DaemonProcess
from decoded.vllm.connector import TransferResults
from decoded.wire import side_channel
from tests.edges.proxy import Proxy
from tests.edges.support import until
from tests.vllm.engine import BLOCK_SIZE, GROUPS, Engine

from .conftest import MakeEngine

VIRTUAL = {"do_remote_prefill": True, "do_virtual": True}
WAIT_MS = 10_000


def remote(proxy: Proxy) -> dict[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": proxy.url}


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return [3 + (seed + n) % 1000 for n in range(tokens)]


def say_done(body: dict[str, Any], ranks: int = 1, within_ms: int = WAIT_MS) -> bool:
    """What P's ranks do when their writes are over. False if D does not hear it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for rank in range(ranks):
            with context.socket(zmq.REQ) as socket:
                socket.linger = 0
                socket.connect(f"tcp://{body['remote_host']}:{body['remote_port'] + rank}")
                done = side_channel.Done(body["request_id"], 1, f"127.0.0.1:{rank + 1}")
                socket.send(side_channel.encode_request(done))
                if not socket.poll(within_ms) or socket.recv() != side_channel.ACK:
                    return False
        return True
    finally:
        context.destroy(linger=0)


def loads(engine: Engine) -> dict[str, float]:
    """The connector's counts so far."""
    total: dict[str, float] = {}
    for stats in engine.stats:
        for key, value in stats.items():
            total[key] = total.get(key, 0) + (len(value) if isinstance(value, list) else value)
    return total


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_virtual_requests_compute_their_last_token_only(
    make_engine: MakeEngine, groups: int, ranks: int
) -> None:
    engine = make_engine(groups, ranks)
    free = engine.free_blocks
    computed: list[int] = []
    for n in range(5):
        engine.add(f"r{n}-0000000{n}", prompt_of(100, 50 * n), dict(VIRTUAL))
    while engine.scheduler.has_requests():
        computed += engine.step().num_scheduled_tokens.values()
    assert engine.tokens == {f"r{n}-0000000{n}": [7, 7] for n in range(5)}
    # One prompt token each, which brings the first token, and one more for the second.
    assert computed == [1] * 10
    assert engine.free_blocks == free
    assert loads(engine) == {"loads_done": 5, "load_seconds": 5, "load_tokens": 500}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_request_goes_the_whole_way(
    make_engine: MakeEngine, proxy: Proxy, ranks: int
) -> None:
    engine = make_engine(ranks=ranks)
    request = engine.add("cmpl-r-0-0a1b2c3d", prompt_of(100), remote(proxy))
    engine.step()
    call = proxy.next()
    blocks = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert call.body["request_id"] == "cmpl-r-0"
    assert call.body["remote_block_ids"] == [list(group) for group in blocks]
    assert call.body["remote_block_size"] == [BLOCK_SIZE]
    assert call.body["remote_cached_tokens"] == 0
    assert call.body["remote_tp_size"] == ranks
    for _ in range(20):
        assert not engine.step().num_scheduled_tokens
    call.answer()
    assert say_done(call.body, ranks)
    engine.run()
    assert engine.tokens == {"cmpl-r-0-0a1b2c3d": [7, 7]}


def test_a_cached_prefix_is_not_fetched_again(make_engine: MakeEngine, proxy: Proxy) -> None:
    engine = make_engine()
    engine.add("a-00000001", prompt_of(4 * BLOCK_SIZE), None)
    engine.run()
    engine.add("b-00000002", prompt_of(6 * BLOCK_SIZE + 3), remote(proxy))
    engine.step()
    call = proxy.next()
    assert call.body["remote_cached_tokens"] == 4 * BLOCK_SIZE
    assert len(call.body["remote_block_ids"][0]) == 7
    call.answer()
    assert say_done(call.body)
    engine.run()
    assert engine.tokens["b-00000002"] == [7, 7]


def test_nothing_is_fetched_for_the_last_token_alone(make_engine: MakeEngine) -> None:
    """There is no proxy: a load would fail, and the request with it."""
    engine = make_engine(policy="fail")
    engine.add("a-00000001", prompt_of(4 * BLOCK_SIZE), None)
    engine.run()
    unreachable = {"do_remote_prefill": True, "metaserver": "http://127.0.0.1:1/"}
    engine.add("b-00000002", prompt_of(4 * BLOCK_SIZE + 1), unreachable)
    engine.add("c-00000003", [5], unreachable)
    engine.run()
    assert engine.tokens["b-00000002"] == engine.tokens["c-00000003"] == [7, 7]
    assert loads(engine) == {}


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add("a-00000001", prompt_of(100), dict(VIRTUAL))
    request.skip_reading_prefix_cache = True
    assert engine.step().num_scheduled_tokens == {"a-00000001": 100}
    engine.run()
    assert loads(engine) == {}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_failed_load_is_recomputed(
    make_engine: MakeEngine, proxy: Proxy, groups: int, ranks: int
) -> None:
    engine = make_engine(groups, ranks, "recompute")
    free = engine.free_blocks
    engine.add("a-00000001", prompt_of(100), remote(proxy))
    engine.step()
    proxy.next().answer(404, "{}")
    engine.run()
    assert engine.tokens == {"a-00000001": [7, 7]}
    assert engine.free_blocks == free
    assert loads(engine)["loads_failed"] == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_failed_load_fails_the_request(
    make_engine: MakeEngine, proxy: Proxy, groups: int, ranks: int
) -> None:
    engine = make_engine(groups, ranks, "fail")
    free = engine.free_blocks
    engine.add("a-00000001", prompt_of(100), remote(proxy))
    engine.add("b-00000002", prompt_of(90), dict(VIRTUAL))
    engine.step()
    proxy.next().answer(502, "{}")
    engine.run()
    assert engine.finished["a-00000001"] == "error"
    assert engine.tokens["b-00000002"] == [7, 7]
    assert engine.free_blocks == free


def test_what_the_daemon_refuses_ends_by_policy(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="fail")
    free = engine.free_blocks
    engine.add("a-00000001", prompt_of(100), {"do_remote_prefill": True, "do_virtual": "yes"})
    engine.add("b-00000002", prompt_of(100), {"do_remote_prefill": True})
    # Not even fit for the wire.
    engine.add("c" * 600, prompt_of(100), dict(VIRTUAL))
    engine.run()
    assert set(engine.finished.values()) == {"error"}
    assert engine.free_blocks == free


def test_an_aborted_load_keeps_its_blocks_until_nobody_writes(
    make_engine: MakeEngine, proxy: Proxy
) -> None:
    engine = make_engine()
    free = engine.free_blocks
    engine.add("a-00000001", prompt_of(100), remote(proxy))
    engine.step()
    call = proxy.next()
    engine.abort("a-00000001")
    for _ in range(20):
        engine.step()
    assert engine.free_blocks < free
    # P's last word.
    assert say_done(call.body)
    call.answer()
    engine.run()
    assert engine.free_blocks == free
    assert loads(engine)["loads_cancelled"] == 1


def test_an_abort_that_crosses_the_outcome(make_engine: MakeEngine) -> None:
    engine = make_engine(ranks=2)
    free = engine.free_blocks
    for n in range(50):
        request_id = f"r{n}-00000001"
        engine.add(request_id, prompt_of(100, n), dict(VIRTUAL))
        engine.step()
        engine.abort(request_id)
    engine.run()
    assert engine.free_blocks == free


def test_a_reused_id_is_another_request(make_engine: MakeEngine) -> None:
    """As with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION."""
    engine = make_engine()
    for _ in range(20):
        engine.add("same", prompt_of(100), dict(VIRTUAL))
        engine.run()
    assert engine.tokens["same"] == [7, 7] * 20


def test_a_preempted_request_is_computed_here(make_engine: MakeEngine) -> None:
    engine = make_engine()
    request = engine.add("a-00000001", prompt_of(100), dict(VIRTUAL), tokens=5)
    engine.step_until(lambda: "a-00000001" in engine.tokens)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    engine.run()
    assert engine.tokens["a-00000001"] == [7] * 5
    assert loads(engine)["loads_done"] == 1


def test_virtual_blocks_are_never_another_requests_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a-00000001", prompt_of(100), dict(VIRTUAL))
    engine.run()
    engine.add("b-00000002", prompt_of(100), None)
    assert engine.step().num_scheduled_tokens == {"b-00000002": 100}
    engine.run()
    # What was computed is found, also by a virtual request.
    engine.add("c-00000003", prompt_of(100), dict(VIRTUAL))
    engine.run()
    assert loads(engine)["load_tokens"] == 100 + 4


@pytest.mark.parametrize("memory", ["shared", "transfer"])
def test_a_daemon_that_restarts(
    make_engine: MakeEngine, daemon: DaemonProcess, proxy: Proxy, memory: str
) -> None:
    engine = make_engine(ranks=2, memory=memory, host="127.0.0.1")
    free = engine.free_blocks
    engine.add("a-00000001", prompt_of(100), remote(proxy))
    engine.add("b-00000002", prompt_of(100), remote(proxy))
    engine.step()
    first = [proxy.next(), proxy.next()]
    daemon.kill()
    for _ in range(20):
        engine.step()
    assert not engine.tokens
    daemon.start()
    # The requests are submitted again, under a new generation of the engine.
    again: list[Any] = []
    while len(again) < 2:
        engine.step_until(lambda: proxy.waiting > 0)
        again.append(proxy.next())
    assert {call.body["request_id"] for call in again} == {"a", "b"}
    assert again[0].body["remote_engine_id"] != first[0].body["remote_engine_id"]
    for call in again:
        if call.body["request_id"] == "a":
            assert say_done(call.body, 2)
        else:
            call.answer(404, "{}")
    engine.run()
    assert engine.tokens == {"a-00000001": [7, 7], "b-00000002": [7, 7]}
    assert engine.free_blocks == free
    engine.add("c-00000003", prompt_of(100), dict(VIRTUAL))
    engine.run()


@pytest.mark.parametrize("memory", ["shared", "transfer"])
def test_a_daemon_that_restarts_while_nothing_happens(
    make_engine: MakeEngine, daemon: DaemonProcess, proxy: Proxy, memory: str
) -> None:
    """The first request after that is loaded, not failed."""
    engine = make_engine(policy="fail", memory=memory, host="127.0.0.1")
    engine.add("a-00000001", prompt_of(100), dict(VIRTUAL))
    engine.run()
    daemon.kill()
    daemon.start()
    until(lambda: [len(each["seats"]) for each in daemon.status()["engines"]] == [2])
    engine.add("b-00000002", prompt_of(100, 500), remote(proxy))
    engine.step_until(lambda: proxy.waiting > 0)
    # Time enough for a step to find the new daemon too late.
    for _ in range(100):
        engine.step()
    assert say_done(proxy.next().body)
    engine.run()
    assert engine.tokens["b-00000002"] == [7, 7]


@pytest.mark.skipif(TransferResults is not None, reason="vLLM 0.32 fails at them by itself")
@pytest.mark.parametrize("params", [5, "x", [1]])
def test_parameters_that_are_none_at_all(make_engine: MakeEngine, params: Any) -> None:
    engine = make_engine()
    engine.add("a-00000001", prompt_of(100), params)
    engine.run()
    assert engine.tokens["a-00000001"] == [7, 7]


@pytest.mark.parametrize("memory", ["shared", "transfer"])
def test_what_cannot_be_submitted_while_the_daemon_is_away_harms_no_other(
    make_engine: MakeEngine, daemon: DaemonProcess, proxy: Proxy, memory: str
) -> None:
    engine = make_engine(policy="recompute", memory=memory, host="127.0.0.1")
    engine.add("a-00000001", prompt_of(100), remote(proxy))
    engine.step()
    call = proxy.next()
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        engine.step_until(lambda: not engine.connector._scheduler._client.connected)
        engine.add("c" * 600, prompt_of(100), dict(VIRTUAL))
        engine.step_until(lambda: "c" * 600 in engine.tokens)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert say_done(call.body)
    engine.run()
    assert loads(engine)["loads_done"] == 1


@pytest.mark.parametrize("memory", ["shared", "transfer"])
def test_a_daemon_that_stays_away(
    make_engine: MakeEngine, daemon: DaemonProcess, proxy: Proxy, memory: str
) -> None:
    engine = make_engine(memory=memory, host="127.0.0.1", daemon_timeout_s=0.5)
    free = engine.free_blocks
    engine.add("a-00000001", prompt_of(100), remote(proxy))
    engine.step()
    proxy.next()
    daemon.kill()
    # Both the one in flight and one that comes meanwhile.
    engine.add("b-00000002", prompt_of(100), dict(VIRTUAL))
    engine.run()
    assert engine.tokens == {"a-00000001": [7, 7], "b-00000002": [7, 7]}
    assert engine.free_blocks == free
    assert loads(engine)["loads_lost"] == 2
    daemon.start()
    engine.add("c-00000003", prompt_of(100, 500), remote(proxy))
    engine.step()
    call = proxy.next()
    assert call.body["request_id"] == "c"
    assert say_done(call.body)
    engine.run()
    assert engine.tokens["c-00000003"] == [7, 7]


def test_no_daemon_is_a_clear_error_at_start(
    make_engine: MakeEngine, daemon: DaemonProcess
) -> None:
    daemon.kill()
    with pytest.raises(Exception, match=f"{daemon.endpoint}.*is .decoded serve. running"):
        make_engine(connect_timeout_s=0.3)
