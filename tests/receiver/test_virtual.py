"""Virtual requests: done at once or after a modelled delay, and nothing else happens."""

from __future__ import annotations

from typing import Any

import pytest

from decoded.core.request import Request, RequestKey
from decoded.testing import BareClient, DaemonProcess
from decoded.virtual import VirtualDelay
from decoded.wire import link as wire
from tests.edges.proxy import Proxy
from tests.edges.support import barrier, outcome, outcomes, request_of, submit, virtual


def marked(name: str, flag: bool | None, params: dict[str, Any] | None) -> wire.Submission:
    return wire.Submission(name, f"x-{name}", [[1]], 16, 0, 1, flag, params)


def test_where_the_mark_may_stand_and_what_it_may_be() -> None:
    with DaemonProcess() as daemon, BareClient(daemon.endpoint) as client, Proxy() as proxy:
        client.hello("e")
        params = {"do_remote_prefill": True, "metaserver": proxy.url}
        submit(
            client,
            marked("flag", True, None),
            marked("params", None, {**params, "do_virtual": True}),
            marked("either", False, {"do_virtual": True}),
        )
        got = outcomes(client, 3)
        assert [each.request_id for each in got] == ["flag", "params", "either"]
        assert {(each.state, each.reason) for each in got} == {("done", "virtual")}
        real = [
            marked("none", None, params),
            marked("null", None, {**params, "do_virtual": None}),
            marked("false", False, {**params, "do_virtual": False}),
        ]
        submit(client, *real)
        barrier(client)
        for each in real:
            found = request_of(daemon, "e", each.request_id)
            assert (found["virtual"], found["state"]) == (False, "accepted")
            assert found["story"][-1]["what"] == "deferred"
        for n, value in enumerate([1, "true", [True], {"a": 1}, 0.0]):
            submit(client, marked(f"bad{n}", None, {"do_virtual": value}))
            [refusal] = client.expect(wire.Refused).requests
            assert (refusal.request_id, refusal.reason) == (f"bad{n}", "invalid")
            assert "do_virtual" in refusal.detail
        assert proxy.waiting == 0
        assert daemon.status()["side_channel_ports"] == []
        client.send(wire.Bye())


def test_a_delay_by_bandwidth_orders_requests_by_what_they_would_fetch() -> None:
    delay = {"latency_s": 0.05, "bandwidth_bytes_per_s": 1e6, "bytes_per_token": 10_000}
    config = {"virtual": {"delay": delay}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as client:
        client.hello("e")
        tokens = {"long": 60, "short": 5, "middle": 30}
        submit(
            client,
            *(
                wire.Submission(name, f"x-{name}", [[1] * 4], count + 100, 100, do_virtual=True)
                for name, count in tokens.items()
            ),
        )
        got = outcomes(client, 3)
        assert [each.request_id for each in got] == ["short", "middle", "long"]
        for each in got:
            # The loop's clock counts whole milliseconds.
            assert each.elapsed_s >= 0.05 + tokens[each.request_id] * 0.01 - 0.002


def test_a_delayed_request_can_be_cancelled_and_its_timer_is_gone() -> None:
    config = {"virtual": {"delay": {"fixed_s": 0.3}}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as client:
        client.hello("e")
        submit(client, virtual("r1"), virtual("r2"))
        client.send(wire.Cancel([wire.Cancellation("r1")]))
        first = outcome(client)
        assert (first.request_id, first.state, first.reason) == ("r1", "cancelled", "cancelled")
        submit(client, virtual("r1", attempt=2))
        second, third = outcomes(client, 2)
        assert (second.request_id, second.state) == ("r2", "done")
        assert (third.request_id, third.attempt, third.state) == ("r1", 2, "done")
        assert third.elapsed_s >= 0.3 - 0.002
        assert daemon.status()["states"]["done"] == 2


@pytest.mark.parametrize(
    ("delay", "prompt", "cached", "expected"),
    [
        (VirtualDelay(2.0), 1_000, 0, 2.0),
        (VirtualDelay(1.0, 10.0, 100.0), 30, 10, 3.0),
        (VirtualDelay(1.0, 10.0, 100.0), 10, 30, 1.0),
    ],
)
def test_the_delay_is_latency_and_the_missing_bytes_over_bandwidth(
    delay: VirtualDelay, prompt: int, cached: int, expected: float
) -> None:
    key = RequestKey("e", "r")
    assert delay.of(Request(key, "x", 1, (), prompt, cached, True, {}, 0.0)) == expected
