"""A P engine and a D engine under vLLM's real schedulers; the daemon and Mooncake between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from decoded.testing import DaemonProcess
from tests.edges.proxy import Call, Proxy
from tests.vllm.engine import (
    BLOCK_SIZE,
    GROUPS,
    LAYERS,
    Engine,
    cache_config,
    kv_of,
    layer_name,
    make_config,
    one_rank_per_process,
    running,
    slots,
)

PROMPT = [3 + n % 1000 for n in range(300)]


class Pair:
    """One engine of each side, stepped by turns, and a proxy that takes D's calls to P."""

    def __init__(self, p: Engine, d: Engine, proxy: Proxy) -> None:
        self.p, self.d, self.proxy = p, d, proxy
        self.prompts: dict[str, list[int]] = {}
        self.calls: dict[str, Call] = {}
        self.free = p.free_blocks, d.free_blocks

    def ask(self, name: str, prompt: list[int]) -> None:
        """A request that D is to fetch, and P to compute once D's call has come."""
        params = {"do_remote_prefill": True, "metaserver": self.proxy.url}
        self.prompts[name] = prompt
        self.d.add(f"{name}-0000000d", prompt, params)

    def forward(self) -> None:
        """Hand one call of the daemon to P."""
        self.d.step_until(lambda: self.proxy.waiting > 0)
        call = self.proxy.next()
        name = call.body["request_id"]
        self.calls[name] = call
        self.p.add(f"{name}-0000000f", self.prompts[name], call.body, tokens=1)

    def step(self) -> None:
        self.p.step()
        self.d.step()
        for name in list(self.calls):
            if f"{name}-0000000f" in self.p.finished:
                self.calls.pop(name).answer()

    def run(self) -> None:
        """Until nobody has anything left to do, and all blocks are back."""
        due = time.monotonic() + 30
        while self.p.scheduler.has_requests() or self.d.scheduler.has_requests():
            assert time.monotonic() < due
            if self.proxy.waiting:
                self.forward()
            self.step()
        assert (self.p.free_blocks, self.d.free_blocks) == self.free

    def fetched(self, name: str) -> bool:
        return self.d.tokens.get(f"{name}-0000000d") == [7, 7]


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(daemon: DaemonProcess, proxy: Proxy, tmp_path: Path) -> Iterator[MakePair]:
    one_rank_per_process()
    with ExitStack() as stack:

        def engine(role: str, groups: int, extra: dict[str, Any], **arguments: Any) -> Engine:
            folder = tmp_path / role
            folder.mkdir()
            transfer = {
                "kv_role": role,
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": extra,
            }
            config = make_config(folder, transfer, **arguments)
            return stack.enter_context(running(Engine(config, cache_config(groups))))

        def make(groups: int = 1, memory: str = "shared", **arguments: Any) -> Pair:
            extra = {"endpoint": daemon.endpoint, "memory": memory, "host": "127.0.0.1"}
            return Pair(
                engine("kv_producer", groups, {"host": "127.0.0.1"}, **arguments),
                engine("kv_consumer", groups, extra),
                proxy,
            )

        yield make


class Watch:
    """Keeps what D's blocks hold at the moment in which a request's load is done."""

    def __init__(self, pair: Pair, name: str) -> None:
        self._pair, self._id = pair, f"{name}-0000000d"
        self.blocks: list[list[int]] = []
        self.caches: list[torch.Tensor] = []
        inner = pair.d.connector.update_connector_output

        def update(output: Any) -> None:
            if self._id in (output.finished_recving or ()):
                found = pair.d.scheduler.kv_cache_manager.get_block_ids(self._id)
                self.blocks = [list(ids) for ids in found]
                self.caches = [pair.d.caches[0][layer_name(n)].clone() for n in range(LAYERS)]
            inner(output)

        pair.d.connector.update_connector_output = update

    def holds(self, prompt: list[int], start: int = 0) -> bool:
        """Whether every layer of the prompt's positions from `start` on is what P computed."""
        assert self.caches, "the load was not reported"
        for number, cache in enumerate(self.caches):
            blocks = self.blocks[self._pair.d.group_of[layer_name(number)]]
            positions = range(start, len(prompt))
            expected = kv_of(number, 0, positions, prompt)
            for at, slot, value in zip(
                positions, slots(cache, blocks, positions), expected, strict=True
            ):
                # Where a sliding window has passed there is no block.
                if blocks[at // BLOCK_SIZE] and not torch.all(slot == value):
                    return False
        return True


@pytest.mark.parametrize("memory", ["shared", "transfer"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("tokens", [2, BLOCK_SIZE, 100, 300])
def test_every_byte_arrives(make_pair: MakePair, tokens: int, groups: int, memory: str) -> None:
    pair = make_pair(groups, memory)
    watch = Watch(pair, "a")
    pair.ask("a", PROMPT[:tokens])
    pair.forward()
    pair.run()
    assert pair.fetched("a")
    assert watch.holds(PROMPT[:tokens])


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("chunk", [16, 50, 64])
def test_chunked_prefill(make_pair: MakePair, chunk: int, groups: int) -> None:
    pair = make_pair(groups, max_num_batched_tokens=chunk, max_num_seqs=4)
    watch = Watch(pair, "a")
    pair.ask("a", PROMPT)
    pair.forward()
    pair.run()
    assert pair.fetched("a")
    assert watch.holds(PROMPT)


def test_several_requests_in_a_step(make_pair: MakePair) -> None:
    pair = make_pair(max_num_batched_tokens=128)
    prompts = {f"r{n}": [50 * n + t for t in range(20 + 13 * n)] for n in range(6)}
    watches = {name: Watch(pair, name) for name in prompts}
    for name, prompt in prompts.items():
        pair.ask(name, prompt)
    # One that nobody waits for shares their steps.
    pair.p.add("other-0000000f", PROMPT[:90], None)
    for _ in prompts:
        pair.forward()
    pair.run()
    for name, prompt in prompts.items():
        assert pair.fetched(name)
        assert watches[name].holds(prompt)


def test_what_p_has_cached_is_sent_too(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.p.add("warm-0000000f", PROMPT[:160], None)
    pair.p.run()
    watch = Watch(pair, "a")
    pair.ask("a", PROMPT)
    pair.forward()
    assert pair.p.step().num_scheduled_tokens == {"a-0000000f": 300 - 160}
    pair.run()
    assert pair.fetched("a")
    assert watch.holds(PROMPT)


def test_what_d_has_cached_is_not_sent(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.d.add("warm-0000000d", PROMPT[:160], None)
    pair.d.run()
    watch = Watch(pair, "a")
    pair.ask("a", PROMPT)
    pair.forward()
    pair.run()
    assert pair.fetched("a")
    assert watch.holds(PROMPT)
    sent = sum(stats.get("push_bytes", 0) for stats in pair.p.stats)
    block = pair.p.caches[0][layer_name(0)][0].nbytes
    assert sent == LAYERS * block * (-(-300 // BLOCK_SIZE) - 160 // BLOCK_SIZE)


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_preempted_prefill_goes_on(make_pair: MakePair, steps: int) -> None:
    pair = make_pair(max_num_batched_tokens=64, max_num_seqs=4)
    watch = Watch(pair, "a")
    pair.ask("a", PROMPT)
    pair.forward()
    for _ in range(steps):
        pair.p.step()
    pair.p.scheduler.reset_prefix_cache(reset_running_requests=True)
    # Its blocks go to another request, which runs first and overwrites them.
    pair.p.add("b-0000000f", [999] * 200, None)
    pair.run()
    assert pair.fetched("a")
    assert watch.holds(PROMPT)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_aborted_prefill_fails_on_d(make_pair: MakePair, steps: int) -> None:
    pair = make_pair(max_num_batched_tokens=64, max_num_seqs=4)
    pair.ask("a", PROMPT)
    pair.forward()
    for _ in range(steps):
        pair.p.step()
    pair.p.abort("a-0000000f")
    pair.calls.pop("a").answer(502, "{}")
    pair.run()
    assert pair.d.finished["a-0000000d"] == "error"
    pair.ask("b", PROMPT[:50])
    pair.forward()
    pair.run()
    assert pair.fetched("b")


def test_a_failed_forward_pass_is_never_done(make_pair: MakePair) -> None:
    """vLLM calls `wait_for_save` all the same, while the exception is under way."""
    pair = make_pair()
    pair.ask("a", PROMPT)
    pair.forward()
    [worker] = pair.p.workers
    worker.bind_connector_metadata(pair.p.scheduler.schedule().kv_connector_metadata)

    def forward() -> None:
        try:
            worker.save_kv_layer(layer_name(0), pair.p.caches[0][layer_name(0)], None)
            raise RuntimeError("out of memory")
        finally:
            worker.wait_for_save()

    with pytest.raises(RuntimeError, match="out of memory"):
        forward()
    pair.d.step_until(lambda: "a-0000000d" in pair.d.finished)
    assert pair.d.finished["a-0000000d"] == "error"


def test_a_d_node_that_vanishes_holds_nothing_up(
    make_pair: MakePair, daemon: DaemonProcess
) -> None:
    pair = make_pair(max_num_batched_tokens=64, max_num_seqs=4)
    pair.ask("a", PROMPT)
    pair.forward()
    daemon.kill()
    # The handshake has nobody to answer it, and the prompt is computed meanwhile.
    for _ in range(5):
        pair.p.step()
    assert pair.p.tokens["a-0000000f"] == [7]
    pair.p.run()
    assert pair.p.free_blocks == pair.free[0]
    daemon.start()


def test_parameters_that_cannot_be_used(make_pair: MakePair) -> None:
    pair = make_pair()
    for number, params in enumerate(
        [
            {"do_remote_decode": True},
            {"do_remote_decode": True, "request_id": 5},
            {"do_remote_decode": True, "remote_port": object},
            {"do_remote_decode": "yes"},
        ]
    ):
        pair.p.add(f"x{number}-0000000f", PROMPT[:50], dict(params))
    pair.p.run()
    assert pair.p.tokens == {f"x{number}-0000000f": [7, 7] for number in range(4)}
    assert pair.p.free_blocks == pair.free[0]


def test_a_prompt_goes_on_after_its_push(make_pair: MakePair) -> None:
    """P may be asked for more than one token; D waits for the prompt only."""
    pair = make_pair()
    watch = Watch(pair, "a")
    pair.ask("a", PROMPT)
    pair.d.step_until(lambda: pair.proxy.waiting > 0)
    call = pair.proxy.next()
    pair.p.add("a-0000000f", PROMPT, call.body, tokens=20)
    pair.p.step()
    call.answer()
    pair.d.run()
    assert "a-0000000f" not in pair.p.finished
    assert watch.holds(PROMPT)
    pair.p.run()
    assert pair.p.tokens["a-0000000f"] == [7] * 20
    assert (pair.p.free_blocks, pair.d.free_blocks) == pair.free
