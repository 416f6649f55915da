"""Daemon, P ranks and D workers with memory on two NPUs: what goes right, and what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decoded.client import Client, Submission
from decoded.testing import DaemonProcess
from tests.edges.proxy import Proxy
from tests.edges.support import until

from .child import Child, run
from .environ import environment
from .nodes_facts import BLOCK_SIZE, BLOCKS, LAYERS, WIDTH

WAIT_S = 60.0
ARRANGEMENTS = ["shared", "pool", "transfer"]
CONFIG: dict[str, Any] = {
    "link": {"heartbeat_s": 0.2, "timeout_s": 20.0},
    "transfer": {"protocol": "ascend", "timeout_s": 1.0},
    "deadlines": {"drain_margin_s": 0.1, "shutdown_s": 1.0},
}
OURS, THEIRS = [5, 1, 2], [3, 4, 6]
"""A request's blocks on D and on P."""
TOKENS = 3 * BLOCK_SIZE - 5


def pool(ranks: int) -> dict[str, Any]:
    tensors = [{"block_len": WIDTH}, {"block_len": WIDTH}]
    return {
        "ranks": ranks,
        "npus": list(range(ranks)),
        "groups": [{"block_size": BLOCK_SIZE, "num_blocks": BLOCKS}],
        "layers": [{"name": "layer.{}", "count": LAYERS, "tensors": tensors}],
    }


class Node:
    """A D node of `ranks` ranks, each with its NPU, and P ranks beside it."""

    def __init__(self, folder: Path, arrangement: str, ranks: int) -> None:
        self._stack = ExitStack()
        self.ranks = ranks
        self.daemon_has_pool = arrangement == "pool"
        config = {**CONFIG, "kv": {"pool": pool(ranks)}} if arrangement == "pool" else CONFIG
        self.daemon = self._stack.enter_context(DaemonProcess(config, folder))
        endpoint = self.daemon.endpoint
        self.scheduler = self._stack.enter_context(
            Client(endpoint, "engine", world_size=ranks, expect_workers=True, tp_size=ranks)
        )
        self.proxy = self._stack.enter_context(Proxy())
        self.workers = [
            self._child("nodes.worker", endpoint, arrangement, rank, rank, ranks)
            for rank in range(ranks)
        ]
        for rank, worker in enumerate(self.workers):
            assert worker.hear() == ["registered", rank]

    def producers(self, **settings: Any) -> list[Child]:
        """One per rank, on the other's NPU."""
        made = [
            self._child("nodes.producer", (rank + 1) % 2, rank, self.ranks, **settings)
            for rank in range(self.ranks)
        ]
        for each in made:
            assert each.hear() == "ready"
        return made

    def push(
        self, name: str, producers: list[Child], seed: int, waits: bool = True
    ) -> tuple[str, str, list[Any]]:
        """One request: its state and reason, and what each P rank says of its push."""
        call = self.asked(name)
        order = {"params": call.body, "tokens": TOKENS, "blocks": THEIRS}
        for each in producers:
            each.tell({**order, "seed": seed, "waits": waits})
        said = [each.hear() for each in producers]
        call.answer(*(() if all(one[0] == "done" for one in said) else (502, "{}")))
        return (*self.ended(), said)

    def asked(self, name: str) -> Any:
        """Submit a request, and take the daemon's call for its prefill."""
        params = {"do_remote_prefill": True, "metaserver": self.proxy.url}
        self.scheduler.submit(
            Submission(name, f"x-{name}", [OURS], TOKENS, kv_transfer_params=params)
        )
        return self.proxy.next()

    def ended(self) -> tuple[str, str]:
        [outcome] = self.scheduler.wait(WAIT_S)
        return outcome.state, outcome.reason

    def differing(self, seed: int) -> list[Any]:
        """Blocks that are not as P has computed them, of all ranks."""
        return [worker.ask([seed, OURS, THEIRS]) for worker in self.workers]

    def close(self) -> None:
        self._stack.close()

    def _child(self, program: str, *arguments: object, **settings: Any) -> Child:
        return self._stack.enter_context(Child(program, *arguments, **settings))


def mapped(pid: int) -> int:
    """Pieces of NPU memory that a process has: the stand-in keeps each in a memfd."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd" in line})


@pytest.fixture(autouse=True)
def _standin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon, which the tests' harness starts, finds the stand-in as well."""
    for name, value in environment(devices=2).items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)


@pytest.fixture
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Node]:
    arrangement, ranks = getattr(request, "param", ("shared", 1))
    folder = tmp_path / "daemon"
    folder.mkdir()
    made = Node(folder, arrangement, ranks)
    yield made
    made.close()


@pytest.mark.parametrize("node", [("vllm shared", 1), ("vllm auto", 1)], indirect=True)
def test_what_the_vllm_plug_in_registers(node: Node) -> None:
    state, _, said = node.push("r1", node.producers(delay_s=0.005), 1)
    assert state == "done", said
    assert node.differing(1) == [[]]


def test_no_thread_strays_to_another_npu() -> None:
    used = run("nodes.threads")
    for rank in (0, 1):
        assert used.pop(f"rank-engine-{rank}_0") == [rank]
        assert used.pop(f"pool-{rank}_0") == [rank]
    assert used == {}


@pytest.mark.parametrize("node", [(each, 2) for each in ARRANGEMENTS], indirect=True)
def test_two_ranks_on_two_npus(node: Node) -> None:
    producers = node.producers()
    for seed in (1, 2):
        state, reason, said = node.push(f"r{seed}", producers, seed)
        assert (state, reason) == ("done", "received"), said
        assert node.differing(seed) == [[], []]
    node.scheduler.submit(Submission("v", "x-v", [OURS], TOKENS, do_virtual=True))
    assert node.ended() == ("done", "virtual")
    assert node.differing(2) == [[], []]
    for worker in node.workers:
        worker.tell("end")
        assert worker.wait() == 0
    # Nobody has mapped an NPU's memory any more, but for the pool.
    kept = node.ranks if node.daemon_has_pool else 0
    assert until(lambda: mapped(node.daemon.pid) == kept)
    assert node.daemon.stop() == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_push_that_does_not_wait_for_the_device_sends_what_is_not_there_yet(
    node: Node, waits: bool
) -> None:
    producers = node.producers(delay_s=0.02)
    state, _, said = node.push("r1", producers, 1, waits)
    assert state == "done", said
    assert (node.differing(1) == [[]]) is waits


@pytest.mark.parametrize("node", [(each, 1) for each in ARRANGEMENTS], indirect=True)
def test_a_producer_that_dies(node: Node) -> None:
    [dying] = node.producers(fault="die 2")
    call = node.asked("r1")
    dying.tell({"params": call.body, "tokens": TOKENS, "blocks": THEIRS, "seed": 1, "waits": True})
    assert dying.wait() != 0
    call.answer(502, "{}")
    assert node.ended() == ("failed", "prefill_failed")
    assert node.push("r2", node.producers(), 2)[0] == "done"
    assert node.differing(2) == [[]]


def test_a_transfer_that_is_refused(node: Node) -> None:
    state, reason, [[said, detail, _]] = node.push("r1", node.producers(fault="refuse"), 1)
    assert (state, reason, said) == ("failed", "sender_failed", "failed"), detail
    assert node.push("r2", node.producers(), 2)[0] == "done"
    assert node.differing(2) == [[]]


def test_a_transfer_that_stalls(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "1500")
    producers = node.producers(fault="stall")
    state, reason, [[said, detail, took_s]] = node.push("r1", producers, 1)
    assert (state, reason, said) == ("failed", "sender_failed", "failed"), detail
    assert took_s >= 1.5
    assert node.push("r2", node.producers(), 2)[0] == "done"
    assert node.differing(2) == [[]]


@pytest.mark.parametrize("node", [("shared", 2), ("transfer", 2)], indirect=True)
def test_a_daemon_that_restarts(node: Node) -> None:
    producers = node.producers()
    assert node.push("r1", producers, 1)[0] == "done"
    node.daemon.kill()
    node.daemon.start()
    for worker in node.workers:
        assert worker.ask("again") == "registered"
    for each in producers:
        each.tell("end")
    assert node.push("r2", node.producers(), 2)[0] == "done"
    assert node.differing(2) == [[], []]
