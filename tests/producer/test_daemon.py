"""The whole road with a real daemon: submit, metaserver, handshake, layers, DONE, finished."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decoded.producer import Producer, Push, PushRequest, RemoteParams
from decoded.producer.metaserver import Metaserver, PrefillFailed
from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire.layout import KvGroup, KvLayout, SharedMemory
from decoded.wire.layout import Region as LayoutRegion

from .memory import copied, make_layout, region_for

HOST = "127.0.0.1"
LAYOUT = make_layout([KvGroup(16, 16)], [0, 0, 0, 0], [512, 512])
LOCAL, REMOTE = [[3, 4, 9]], [[8, 1, 2]]
CONFIG: dict[str, Any] = {"side_channel": {"bind_host": HOST, "advertise_host": HOST}}


def _register(worker: BareClient, region_name: str) -> None:
    layout = KvLayout(
        [LayoutRegion(region_name, LAYOUT.regions[0].size)], LAYOUT.groups, LAYOUT.layers
    )
    worker.hello("engine-d", role="worker", session="w", subscribe=False)
    worker.send(wire.RegisterKv(1, SharedMemory(layout)))
    worker.expect(wire.KvRegistered, timeout_s=30)


def _submit(scheduler: BareClient, url: str, cached_tokens: int = 0) -> None:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url}
    scheduler.send(
        wire.Submit(
            [
                wire.Submission(
                    "cmpl-1-0a1b2c3d",
                    "cmpl-1",
                    REMOTE,
                    prompt_tokens=40,
                    cached_tokens=cached_tokens,
                    kv_transfer_params=params,
                )
            ]
        )
    )


def _outcome(scheduler: BareClient) -> wire.OutcomeItem:
    [outcome] = scheduler.expect(wire.Finished, timeout_s=60).outcomes
    return outcome


@pytest.mark.parametrize(("cached", "fail_after", "state"), [(0, None, "done"), (17, 2, "failed")])
def test_a_request_from_submit_to_its_outcome(
    cached: int, fail_after: int | None, state: str
) -> None:
    async def run(daemon: DaemonProcess, producer: Producer) -> wire.OutcomeItem:
        async def prefill(params: RemoteParams) -> None:
            assert params.remote_cached_tokens == cached
            push: Push = await asyncio.to_thread(producer.open, PushRequest(params, 40, LOCAL))
            for index in range(len(LAYOUT.layers)):
                if index == fail_after:
                    await asyncio.wrap_future(push.fail("the prefill broke"))
                    raise PrefillFailed("the prefill broke")
                push.layer(index)
            result = await asyncio.wrap_future(push.seal())
            assert (result.state, result.acknowledged) == ("done", True)

        async with Metaserver(prefill, HOST) as server:
            with BareClient(daemon.endpoint) as scheduler:
                scheduler.hello("engine-d")
                _submit(scheduler, server.url, cached)
                return await asyncio.to_thread(_outcome, scheduler)

    with (
        region_for(LAYOUT, seed=3) as source,
        region_for(LAYOUT) as target,
        DaemonProcess(CONFIG) as daemon,
        BareClient(daemon.endpoint) as worker,
        Producer(LAYOUT, [source.address], host=HOST) as producer,
    ):
        _register(worker, target.name)
        before = bytes(target.buffer)
        outcome = asyncio.run(run(daemon, producer))
        assert (outcome.request_id, outcome.state) == ("cmpl-1-0a1b2c3d", state)
        content, starts = bytes(source.buffer), [cached // 16]
        if state == "done":
            expected = copied(LAYOUT, content, LAYOUT, before, LOCAL, REMOTE, starts)
            assert bytes(target.buffer) == expected
        else:
            assert "broke" in outcome.detail or producer.sender in outcome.detail
