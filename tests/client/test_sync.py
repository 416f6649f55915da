"""The synchronous client against a real daemon, and a scripted one for what that never says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from decoded.client import (
    Client,
    ClientBroken,
    ClientClosed,
    ClientError,
    ClientForked,
    DuplicateSubmission,
    InvalidSubmission,
    Limits,
    NoAnswer,
    Outcome,
    ProtocolFault,
    RegistrationFailed,
    SeatTaken,
    UnsupportedProtocol,
    WorldSizeMismatch,
)
from decoded.client.dealer import Dealer
from decoded.testing import DaemonProcess
from decoded.wire import link
from decoded.wire.layout import PoolMemory, SharedMemory

from .conftest import Scripted, real, virtual

PATIENT_S = 20.0


def collect(client: Client, count: int) -> list[Outcome]:
    """Exactly `count` outcomes, within a time that is never reached."""
    outcomes: list[Outcome] = []
    due = time.monotonic() + PATIENT_S
    while len(outcomes) < count and time.monotonic() < due:
        outcomes += client.wait(due - time.monotonic())
    assert len(outcomes) == count
    return outcomes


def test_a_virtual_request_is_done(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        assert client.poll() == []
        client.submit(virtual("a"))
        [outcome] = client.wait(PATIENT_S)
        assert (outcome.request_id, outcome.external_id, outcome.attempt) == ("a", "x-a", 1)
        assert (outcome.state, outcome.reason, outcome.ok) == ("done", "virtual", True)
        assert client.poll() == []
        assert client.pending == 0


def test_polling_alone_is_enough(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.submit(*[virtual(f"r{n}") for n in range(100)])
        outcomes: list[Outcome] = []
        due = time.monotonic() + PATIENT_S
        while len(outcomes) < 100 and time.monotonic() < due:
            outcomes += client.poll()
        assert [one.request_id for one in outcomes] == [f"r{n}" for n in range(100)]


def test_it_may_be_made_before_the_daemon(tmp_path: Any) -> None:
    later = DaemonProcess(None, tmp_path)
    with Client(later.endpoint, "engine") as client:
        client.submit(virtual("a"), virtual("b"))
        assert not client.connected
        with later:
            assert {one.request_id for one in collect(client, 2)} == {"a", "b"}


def test_a_cancelled_request_ends_cancelled(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.submit(real("a"), real("b"))
        client.cancel("b")
        assert [(one.request_id, one.state) for one in collect(client, 1)] == [("b", "cancelled")]
        assert client.pending == 1
        with pytest.raises(DuplicateSubmission):
            client.submit(real("a"))


def test_requests_outlive_a_killed_daemon(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.submit(real("a"), virtual("b"))
        assert [one.request_id for one in collect(client, 1)] == ["b"]
        daemon.kill()
        client.submit(virtual("c"))
        client.cancel("a")
        daemon.start()
        ended = {one.request_id: one.state for one in collect(client, 2)}
        assert ended == {"a": "cancelled", "c": "done"}
        assert client.poll() == []


def test_a_daemon_that_hangs_and_recovers_loses_nothing(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.wait_connected()
        os.kill(daemon.pid, signal.SIGSTOP)
        try:
            client.submit(virtual("a"))
            due = time.monotonic() + PATIENT_S
            while client.connected and time.monotonic() < due:
                assert client.wait(0.05) == []
            assert isinstance(client.problem, NoAnswer)
            with pytest.raises(NoAnswer, match="nothing heard from the daemon"):
                client.status(timeout_s=0.01)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
        assert [one.request_id for one in collect(client, 1)] == ["a"]
        client.submit(virtual("b"))
        assert [one.request_id for one in collect(client, 1)] == ["b"]


def test_outcomes_go_to_workers_too(daemon: DaemonProcess) -> None:
    with (
        Client(daemon.endpoint, "engine", world_size=2, expect_workers=True) as scheduler,
        Client(daemon.endpoint, "engine", "worker", 0, 2) as first,
    ):
        scheduler.submit(virtual("a"))
        collect(scheduler, 1)
        assert [one.request_id for one in collect(first, 1)] == ["a"]
        with Client(daemon.endpoint, "engine", "worker", 1, 2) as second:
            assert [one.request_id for one in collect(second, 1)] == ["a"]


def test_a_registration_comes_back_with_a_restarted_daemon(
    daemon: DaemonProcess, memory: SharedMemory
) -> None:
    with Client(daemon.endpoint, "engine", "worker") as worker:
        before = worker.register_kv(memory)
        assert worker.registration == before
        assert before.side_channel_port > 0
        assert before.layout == memory.layout
        boot = worker.wait_connected().boot
        daemon.kill()
        daemon.start()
        due = time.monotonic() + PATIENT_S
        while worker.registration is before and time.monotonic() < due:
            worker.wait(0.02)
        assert worker.wait_connected().boot != boot
        assert worker.registration is not before
        worker.unregister_kv()
        assert worker.registration is None


def test_a_registration_that_cannot_be_says_why(
    daemon: DaemonProcess, memory: SharedMemory
) -> None:
    with Client(daemon.endpoint, "engine", "worker") as worker:
        with pytest.raises(RegistrationFailed) as caught:
            worker.register_kv(PoolMemory())
        assert caught.value.code == "no_pool"
        worker.register_kv(memory)


def test_status_shows_requests(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.submit(real("a"))
        status = client.status(request_id="a")
        assert status["pid"] == daemon.pid
        assert "engine" in str(status["engines"])


def test_two_schedulers_of_one_engine(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as first:
        first.wait_connected()
        second = Client(daemon.endpoint, "engine", limits=Limits(patience_s=0.5))
        with pytest.raises((SeatTaken, NoAnswer), match="seat_taken"):
            second.wait_connected(PATIENT_S)
        with pytest.raises(SeatTaken, match="another id"):
            second.wait(PATIENT_S)
        with pytest.raises(SeatTaken):
            second.poll()
        with pytest.raises(SeatTaken):
            second.submit(virtual("a"))
        second.close()


def test_a_seat_is_free_after_close(daemon: DaemonProcess) -> None:
    for number in range(3):
        with Client(daemon.endpoint, "engine") as client:
            client.submit(virtual(f"r{number}"))
            collect(client, 1)


def test_a_wrong_world_size_reaches_the_caller(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine", world_size=1) as scheduler:
        scheduler.wait_connected()
        worker = Client(daemon.endpoint, "engine", "worker", 1, 2)
        with worker, pytest.raises(WorldSizeMismatch):
            worker.wait(PATIENT_S)


def test_errors_of_the_caller_are_raised_at_once(
    daemon: DaemonProcess, memory: SharedMemory
) -> None:
    with Client(daemon.endpoint, "engine") as client:
        with pytest.raises(InvalidSubmission, match="'a'"):
            client.submit(link.Submission("a", "x", [[-1]], 1))
        with pytest.raises(ClientError, match="scheduler"):
            client.register_kv(memory)
    worker = Client(daemon.endpoint, "engine", "worker")
    with worker, pytest.raises(ClientError, match="worker"):
        worker.submit(virtual("a"))
    for wrong in ({"role": "worker", "rank": 3}, {"rank": 1}, {"engine_id": ""}, {"role": "boss"}):
        with pytest.raises(ValueError, match=r".+"):
            Client(**{"endpoint": daemon.endpoint, "engine_id": "engine", **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonsense"):
        Client("nonsense", "engine")


def test_after_close_leftover_outcomes_can_be_had_and_then_it_says_so(
    daemon: DaemonProcess,
) -> None:
    client = Client(daemon.endpoint, "engine")
    client.submit(virtual("a"))
    due = time.monotonic() + PATIENT_S
    while client.pending and time.monotonic() < due:
        client.status()
    client.close()
    client.close()
    assert [one.request_id for one in client.wait(0)] == ["a"]
    for call in (client.poll, client.wait, client.status, lambda: client.submit(virtual("b"))):
        with pytest.raises(ClientClosed):
            call()


def test_close_does_not_wait_for_a_daemon_that_never_was(tmp_path: Any) -> None:
    client = Client(f"ipc://{tmp_path}/nobody.sock", "engine")
    client.submit(virtual("a"))
    with pytest.raises(NoAnswer, match=r"status.*nobody.sock"):
        client.status(timeout_s=0.01)
    client.close(linger_s=60.0)


def test_close_ends_a_wait_in_another_thread(tmp_path: Any) -> None:
    client = Client(f"ipc://{tmp_path}/nobody.sock", "engine")
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(client.wait) for _ in range(2)]
        while client._io._reader is None:
            os.sched_yield()
        client.close()
        for wait in waits:
            assert isinstance(wait.exception(PATIENT_S), ClientClosed)


def test_many_threads_share_a_client(daemon: DaemonProcess) -> None:
    each, threads = 200, 4
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def work(mine: int) -> None:
        for number in range(each):
            client.submit(virtual(f"{mine}-{number}"))
            got = client.poll() if number % 2 else client.wait(0.01)
            with lock:
                outcomes.extend(got)

    with Client(daemon.endpoint, "engine") as client:
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, mine) for mine in range(threads)]:
                done.result()
        outcomes += collect(client, each * threads - len(outcomes))
    assert len({one.request_id for one in outcomes}) == each * threads


def test_a_forked_child_is_told(daemon: DaemonProcess) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.submit(virtual("a"))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                calls: list[Callable[[], object]] = [
                    client.poll,
                    client.wait,
                    client.status,
                    lambda: client.submit(virtual("b")),
                ]
                for call in calls:
                    try:
                        call()
                    except ClientForked:
                        os.write(writer, b"y")
                client.close()
            finally:
                os._exit(0)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 10) == b"yyyy"
        os.close(reader)
        assert len(collect(client, 1)) == 1


@pytest.mark.parametrize("keep", ["client = ", ""])
def test_an_unclosed_client_says_good_bye_at_exit(daemon: DaemonProcess, keep: str) -> None:
    code = (
        "import sys; from decoded.client import Client\n"
        f"{keep}Client(sys.argv[1], 'engine'){'' if keep else '.wait_connected()'}\n"
        f"{'client.wait_connected()' if keep else ''}\n"
    )
    subprocess.run([sys.executable, "-c", code, daemon.endpoint], check=True, timeout=30)
    assert daemon.status()["sessions"] == 0
    assert "said bye" in daemon.log


def test_a_dropped_client_gives_its_seat_back(daemon: DaemonProcess) -> None:
    client = Client(daemon.endpoint, "engine")
    client.wait_connected()
    thread = client._io._thread
    del client
    thread.join(PATIENT_S)
    assert not thread.is_alive()
    with Client(daemon.endpoint, "engine") as another:
        another.wait_connected()


def test_a_defect_in_the_i_o_is_raised_by_the_next_calls(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(daemon.endpoint, "engine") as client:
        client.wait_connected()

        def fail(dealer: Dealer) -> list[bytes]:
            raise OSError("made up")

        monkeypatch.setattr(Dealer, "receive", fail)
        with pytest.raises(ClientBroken, match="made up") as caught:
            client.submit(virtual("a"))
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(ClientBroken, match="made up"):
            client.poll()


def test_another_protocol_version_is_final(scripted: Callable[..., Scripted]) -> None:
    refusal = link.Error("unsupported_protocol", "this daemon speaks 7", "hello")
    peer = scripted(lambda message: [link.encode(refusal)])
    with Client(peer.endpoint, "engine") as client:
        with pytest.raises(UnsupportedProtocol, match="speaks 7"):
            client.wait_connected(PATIENT_S)
        with pytest.raises(UnsupportedProtocol):
            client.poll()


def test_something_else_at_the_endpoint_is_final(scripted: Callable[..., Scripted]) -> None:
    peer = scripted(lambda message: [b"GET / HTTP/1.1"])
    with Client(peer.endpoint, "engine") as client, pytest.raises(ProtocolFault):
        client.wait(PATIENT_S)


def test_the_daemon_hears_one_frame_per_batch(scripted: Callable[..., Scripted]) -> None:
    def answer(message: link.FromClient) -> list[bytes]:
        if isinstance(message, link.Hello):
            return [link.encode(link.Welcome(1, "0", "b", "b.1", 1.0, 10.0))]
        if isinstance(message, link.Submit):
            items = [
                link.OutcomeItem(one.request_id, one.external_id, 1, "done", "virtual")
                for one in message.requests
            ]
            return [link.encode(link.Finished("b.1", 1, items))] * 2
        return []

    peer = scripted(answer)
    with Client(peer.endpoint, "engine") as client:
        client.submit(*[virtual(f"r{n}") for n in range(50)])
        collect(client, 50)
        assert client.poll() == []
    kinds = [type(one) for one in peer.heard]
    assert kinds == [link.Hello, link.Submit, link.Acknowledge, link.Bye]
    assert peer.heard[2] == link.Acknowledge("b.1", 50)
