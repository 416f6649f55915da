"""Who gets which outcomes: reconnecting, restarting, workers, silence, farewell."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire

from .support import barrier, outcome, outcomes, request_of, status_of, submit, unique, until
from .support import virtual as request

CONFIG = {
    "link": {"heartbeat_s": 0.2, "timeout_s": 60.0},
    "virtual": {"delay": {"latency_s": 0.0, "bandwidth_bytes_per_s": 1.0, "bytes_per_token": 1}},
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(CONFIG) as daemon:
        yield daemon


def quick(name: str) -> wire.Submission:
    """Ends at once: the engine holds every token."""
    return request(name, cached_tokens=32)


def slow(name: str) -> wire.Submission:
    """Takes 32 s: as many as it has tokens to fetch."""
    return request(name)


def test_a_reconnected_session_gets_what_it_has_not_acknowledged(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as before:
        before.hello(engine)
        submit(before, quick("r1"), quick("r2"), quick("r3"))
        finished = before.expect(wire.Finished)
        assert [each.request_id for each in finished.outcomes] == ["r1", "r2", "r3"]
        before.send(wire.Acknowledge(finished.log, finished.first))
        barrier(before)
    with BareClient(daemon.endpoint) as after:
        welcome = after.hello(engine)
        assert welcome.log == finished.log
        again = after.expect(wire.Finished)
        assert (again.log, again.first) == (finished.log, finished.first + 1)
        assert again.outcomes == finished.outcomes[1:]
        after.send(wire.Acknowledge(again.log, again.first + 1))
        barrier(after)
    with BareClient(daemon.endpoint) as last:
        last.hello(engine)
        submit(last, quick("r4"))
        assert last.expect(wire.Finished).outcomes[0].request_id == "r4"


def test_a_scheduler_that_starts_anew_is_not_told_of_its_old_requests(
    daemon: DaemonProcess,
) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as before:
        log = before.hello(engine, session="before").log
        submit(before, quick("old-done"), slow("old-live"))
        barrier(before)
    with BareClient(daemon.endpoint) as after:

        def seated() -> wire.Welcome | None:
            after.send(wire.Hello(1, engine, "after", "scheduler"))
            message = after.receive()
            return message if isinstance(message, wire.Welcome) else None

        assert until(seated).log != log
        submit(after, quick("new"))
        assert outcome(after).request_id == "new"
        assert request_of(daemon, engine, "old-live")["state"] == "cancelled"


def test_acknowledging_another_log_changes_nothing(daemon: DaemonProcess) -> None:
    with BareClient(daemon.endpoint) as client:
        engine = unique("e")
        client.hello(engine)
        submit(client, quick("r1"))
        finished = client.expect(wire.Finished)
        client.send(wire.Acknowledge("another.1", 1))
        client.send(wire.Acknowledge(finished.log, 10**6))
        barrier(client)
        status = status_of(daemon, engine)
        assert status is not None
        assert status["unacknowledged"] == 1


def test_workers_receive_outcomes_too_even_a_late_one(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as scheduler, BareClient(daemon.endpoint) as early:
        scheduler.hello(engine, world_size=2, expect_workers=True)
        early.hello(engine, role="worker", rank=0, world_size=2, session="w0")
        submit(scheduler, quick("r1"), quick("r2"))
        for client in (scheduler, early):
            assert [each.request_id for each in outcomes(client, 2)] == ["r1", "r2"]
        with BareClient(daemon.endpoint) as late:
            late.hello(engine, role="worker", rank=1, world_size=2, session="w1")
            assert [each.request_id for each in outcomes(late, 2)] == ["r1", "r2"]
            barrier(late)
            status = status_of(daemon, engine)
            assert status is not None
            assert status["unacknowledged"] == 0


def test_who_does_not_subscribe_gets_none(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as scheduler, BareClient(daemon.endpoint) as worker:
        scheduler.hello(engine)
        worker.hello(engine, role="worker", session="w", subscribe=False)
        submit(scheduler, quick("r1"))
        assert outcome(scheduler).request_id == "r1"
        worker.send(wire.Heartbeat(5))
        message = worker.receive()
        while message == wire.Heartbeat():  # the daemon's own
            message = worker.receive()
        assert message == wire.Heartbeat(5)


def test_a_silent_session_is_closed_and_its_requests_end() -> None:
    engine = unique("e")
    config = {**CONFIG, "link": {"heartbeat_s": 0.2, "timeout_s": 1.0}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as client:
        client.hello(engine)
        submit(client, slow("r1"))
        barrier(client)
        found = until(lambda: (r := request_of(daemon, engine, "r1"))["state"] == "cancelled" and r)
        assert found["reason"] == "engine_lost"
        assert "not heard" in found["detail"]
        client.send(wire.Heartbeat(1))
        assert client.expect(wire.Error).code == "hello_required"


def test_a_daemon_that_was_stopped_has_not_heard_yet_what_came_meanwhile() -> None:
    engine = unique("e")
    config = {**CONFIG, "link": {"heartbeat_s": 0.1, "timeout_s": 0.5}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as client:
        client.hello(engine)
        submit(client, slow("r1"))
        barrier(client)
        os.kill(daemon.pid, signal.SIGSTOP)
        client.send(wire.Heartbeat(1))
        time.sleep(1.0)  # Not to wait for something: this is the silence.
        os.kill(daemon.pid, signal.SIGCONT)
        barrier(client)
        assert request_of(daemon, engine, "r1")["state"] not in ("cancelled", "failed")


def test_bye_ends_requests_and_forgets_the_engine(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as client:
        client.hello(engine)
        submit(client, slow("r1"))
        client.send(wire.Bye())
        client.send(wire.Heartbeat(1))
        assert client.expect(wire.Error).code == "hello_required"
        assert status_of(daemon, engine) is None
        found = request_of(daemon, engine, "r1")
        assert (found["state"], found["reason"]) == ("cancelled", "engine_lost")


def test_status_finds_a_request_by_either_id_with_its_story(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as client:
        client.hello(engine)
        submit(client, slow("live"), quick("done"))
        assert outcome(client).request_id == "done"
        for name, state in (("live", "accepted"), ("done", "done")):
            for asked in (name, f"x-{name}"):
                client.send(wire.StatusQuery(4, engine_id=engine, request_id=asked))
                report = client.expect(wire.StatusReport)
                [found] = report.status["requests"]
                assert report.token == 4
                assert (found["request_id"], found["state"]) == (name, state)
                assert found["story"][0]["what"] == "accepted"
        assert daemon.status(engine_id=engine, request_id="nobody")["requests"] == []
        assert len(daemon.status(engine_id=engine, limit=0)["requests"]) == 0
        client.send(wire.Bye())
