"""The daemon as a process: starting, refusing to start, stopping, taking over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from tests.edges.support import until


def submission(n: int, **fields: object) -> wire.Submission:
    given = {"do_virtual": True, **fields}
    return wire.Submission(f"r{n}", f"x{n}", [[1, 2]], 32, **given)  # type: ignore[arg-type]


def shared_memory(daemon: DaemonProcess) -> list[str]:
    """What this test's daemons, dead or alive, have in /dev/shm: regions bear their boot's name."""
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    boots = [line["boot"] for line in lines if line["event"] == "ready"]
    return [name for name in os.listdir("/dev/shm") if any(boot in name for boot in boots)]


POOL = {
    "pool": {
        "groups": [{"block_size": 16, "num_blocks": 8}],
        "layers": [{"name": "layer.{}", "count": 2, "tensors": [{"block_len": 4096}]}],
    }
}


def test_sigterm_ends_it_with_code_0_and_nothing_is_left_behind(tmp_path: Path) -> None:
    with DaemonProcess({"kv": POOL}, tmp_path) as daemon:
        # It answers before its log has been written.
        assert len(until(lambda: shared_memory(daemon))) == 1
        assert (tmp_path / "decoded.sock").is_socket()
        assert daemon.stop() == 0
        assert shared_memory(daemon) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "daemon.log"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_stop_it_in_order(number: int) -> None:
    with DaemonProcess() as daemon:
        assert daemon.stop(number) == 0
        events = [json.loads(line)["event"] for line in daemon.log.splitlines()]
        assert events[-2:] == ["stopping", "stopped"]


def test_it_serves_virtual_requests_without_torch_and_mooncake() -> None:
    with DaemonProcess() as daemon:
        with BareClient(daemon.endpoint) as client:
            client.hello("engine")
            client.send(wire.Submit([submission(1)]))
            [outcome] = client.expect(wire.Finished).outcomes
            assert (outcome.state, outcome.reason) == ("done", "virtual")
        mapped = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "libtorch" not in mapped
        assert "mooncake" not in mapped


def test_a_second_daemon_on_the_same_socket_names_the_first(tmp_path: Path) -> None:
    with DaemonProcess(folder=tmp_path) as first:
        second = subprocess.run(
            [sys.executable, "-m", "decoded", "serve", "--config", str(tmp_path / "config.yaml")],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert second.returncode != 0
        assert f"pid {first.pid}" in second.stderr
        assert first.status()["pid"] == first.pid


def test_a_dead_daemons_socket_and_memory_are_taken_over(tmp_path: Path) -> None:
    with DaemonProcess({"kv": POOL}, tmp_path) as daemon:
        [dead] = until(lambda: shared_memory(daemon))
        daemon.kill()
        assert (tmp_path / "decoded.sock").exists()
        assert shared_memory(daemon) == [dead]
        daemon.start()
        [name] = until(lambda: [name for name in shared_memory(daemon) if name != dead])
        assert shared_memory(daemon) == [name]
        assert daemon.stop() == 0
        assert shared_memory(daemon) == []


def test_what_an_engine_left_goes_with_the_daemon_at_the_latest(tmp_path: Path) -> None:
    with DaemonProcess(folder=tmp_path) as daemon:
        dead = subprocess.run(
            [sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, check=False
        ).stdout.strip()
        assert dead in os.listdir("/dev/shm")
        assert daemon.stop() == 0
        assert dead not in os.listdir("/dev/shm")


_KILLED = """
import os, signal
from decoded.kv.regions import SharedRegion
region = SharedRegion.create(f"/decoded-client-{os.getpid()}-test", 4096)
print(region.name[1:], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_address_of_another_machine_is_refused_at_start(tmp_path: Path) -> None:
    daemon = DaemonProcess({"side_channel": {"bind_host": "192.0.2.9"}}, tmp_path)
    with pytest.raises(RuntimeError, match=r"bind_host.*cannot listen on 192\.0\.2\.9"):
        daemon.start()


def test_a_taken_side_channel_port_is_named_with_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = DaemonProcess({"side_channel": {"base_port": port, "ranks": 1}})
        with pytest.raises(RuntimeError) as failure:
            daemon.start()
        assert f"port {port}" in str(failure.value)
        assert f"pid {os.getpid()}" in str(failure.value)
        assert "side_channel.base_port" in str(failure.value)
        daemon.close()


def test_a_taken_link_port_is_named_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        process = subprocess.run(
            [sys.executable, "-m", "decoded", "serve", "--set", f"link.endpoint={endpoint}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={**os.environ, "RUNTIME_DIRECTORY": str(tmp_path)},
        )
    assert process.returncode == 4
    assert f"pid {os.getpid()}" in process.stderr
    assert "link.endpoint" in process.stderr


def test_requests_in_flight_end_before_it_stops_and_new_ones_are_refused() -> None:
    config = {"virtual": {"delay": {"fixed_s": 1.0}}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as client:
        client.hello("engine")
        client.send(wire.Submit([submission(1)]))
        client.send(wire.Heartbeat(1))
        client.expect(wire.Heartbeat)
        os.kill(daemon.pid, signal.SIGTERM)
        until = time.monotonic() + 10
        reason, n = "", 2
        while reason != "shutting_down":
            assert time.monotonic() < until
            client.send(wire.Submit([submission(n)]))
            client.send(wire.Heartbeat(n))
            while not isinstance(message := client.receive(), wire.Heartbeat):
                if isinstance(message, wire.Refused):
                    reason = message.requests[0].reason
            n += 1
        ended = {o.request_id: o.state for o in client.expect(wire.Finished).outcomes}
        assert ended["r1"] == "done"
        assert daemon.wait(10) == 0


def test_what_is_left_at_the_shutdown_deadline_expires_and_is_reported() -> None:
    config = {"virtual": {"delay": {"fixed_s": 60.0}}, "deadlines": {"shutdown_s": 0.2}}
    with DaemonProcess(config) as daemon, BareClient(daemon.endpoint) as client:
        client.hello("engine")
        client.send(wire.Submit([submission(1)]))
        client.send(wire.Heartbeat(1))
        client.expect(wire.Heartbeat)
        os.kill(daemon.pid, signal.SIGTERM)
        [outcome] = client.expect(wire.Finished).outcomes
        assert (outcome.state, outcome.reason) == ("expired", "shutdown")
        assert daemon.wait(10) == 0
