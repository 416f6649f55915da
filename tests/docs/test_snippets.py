"""The code on the pages runs as it stands."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

import pytest

from decoded.cli import _parser
from decoded.client import AsyncClient, Client, Submission
from decoded.client.memory import SharedCaches, plan_layout
from decoded.config.schema import PoolGroup, PoolLayer, PoolTensor
from decoded.testing import DaemonProcess

from . import pages

HOST = "127.0.0.1"
POOL: dict[str, Any] = {
    "groups": [{"block_size": 16, "num_blocks": 8}],
    "layers": [{"name": "layers.{}", "count": 2, "tensors": [{"block_len": 512}] * 2}],
}


def run(name: str, replaced: dict[str, str]) -> dict[str, Any]:
    """Run all Python blocks of a page in one module; its names."""
    source = "\n".join(pages.code(pages.read(name), "python"))
    for old, new in replaced.items():
        assert old in source
        source = source.replace(old, new)
    module: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), module)
    return module


def test_client_page(capsys: pytest.CaptureFixture[str]) -> None:
    with DaemonProcess({"kv": {"pool": POOL}}) as daemon:
        run("docs/client.md", {"ipc:///run/decoded/decoded.sock": daemon.endpoint})
    said = capsys.readouterr().out
    for line in (
        "r1-0a1b2c3d done virtual",
        "generation 1 port ",
        "torch.Size([64, 2, 16, 64])",
        "512 bytes per block",
        "r2-5e6f7a8b done",
        "'done': 1",
    ):
        assert line in said


def test_errors_of_the_client_are_described() -> None:
    from decoded.client import errors

    described = pages.names(pages.section(pages.read("docs/client.md"), "When the daemon is away"))
    missing = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.ClientError)
    } - described
    assert missing == {"DaemonError"}


def test_producer_page(capsys: pytest.CaptureFixture[str]) -> None:
    """D receives what the page's program has computed."""
    page = run("docs/producer.md", {})
    tensors = (PoolTensor(block_len=4096), PoolTensor(block_len=4096))
    layers = [PoolLayer(name=name, tensors=tensors) for name in page["caches"]]
    planned = plan_layout([PoolGroup(block_size=16, num_blocks=8)], layers)

    async def play(endpoint: str) -> list[str]:
        ready, over = asyncio.Event(), asyncio.Event()
        node = asyncio.create_task(page["serve"](HOST, 0, ready, over))
        await asyncio.wait_for(ready.wait(), 30)
        params = {"metaserver": capsys.readouterr().out.split()[-1]}
        async with AsyncClient(endpoint, "engine") as client:
            await client.submit(
                Submission("r1-1", "r1", [[3, 7, 1, 2]], 60, kv_transfer_params=params),
                Submission("r9-1", "r9", [[4]], 10, kv_transfer_params=params),
            )
            found = [*await client.wait(30)]
            while len(found) < 2:
                found += await client.wait(30)
        over.set()
        await node
        return sorted(f"{o.external_id} {o.state} {o.reason}" for o in found)

    with (
        DaemonProcess() as daemon,
        Client(daemon.endpoint, "engine", "worker", subscribe=False) as worker,
        SharedCaches.create(planned) as received,
    ):
        worker.register_kv(received.memory)
        assert asyncio.run(play(daemon.endpoint)) == [
            "r1 done received",
            "r9 failed prefill_failed",
        ]
        for layer in page["caches"]:
            for tensor in (0, 1):
                for block in (3, 7, 1, 2):
                    assert set(received.block(layer, tensor, block)) == {11}
                assert set(received.block(layer, tensor, 4)) == {0}
        worker.unregister_kv()


def commands() -> list[tuple[str, str]]:
    found = []
    for name in ("README.md", "docs/operations.md"):
        text = pages.read(name)
        lines = [line for block in pages.code(text, "sh") for line in block.splitlines()]
        lines += sorted(span for span in pages.names(text) if span.startswith("decoded "))
        found += [(name, line) for line in lines if line.startswith("decoded ")]
    return found


@pytest.mark.parametrize(("name", "line"), commands())
def test_commands_on_the_pages_exist(name: str, line: str) -> None:
    words = shlex.split(line)[1:]
    args = _parser(words).parse_args(words)
    assert args.command == words[0]
