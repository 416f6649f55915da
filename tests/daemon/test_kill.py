"""kill -9 at each stage of the daemon's life: the next start cleans up and serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decoded.kv.regions import SHM
from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire.layout import PoolMemory
from tests.edges.proxy import Proxy
from tests.edges.support import (
    CONFIG,
    barrier,
    outcome,
    real,
    register,
    request_of,
    submit,
    until,
    virtual,
)
from tests.receiver.worker import Worker

POOL: dict[str, Any] = {
    "groups": [{"block_size": 16, "num_blocks": 8}],
    "layers": [{"name": "layer.{}", "count": 2, "tensors": [{"block_len": 4096}]}],
}
SETTINGS: dict[str, Any] = {
    **CONFIG,
    "kv": {"pool": POOL},
    "deadlines": {**CONFIG["deadlines"], "shutdown_s": 60.0},
}


def shared_memory() -> set[str]:
    return {name for name in os.listdir(SHM) if name.startswith("decoded-")}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """Running; whatever the test does to it, the next start must serve and leave nothing."""
    before = shared_memory()
    daemon = DaemonProcess(SETTINGS, tmp_path).start()
    yield daemon
    daemon.start()
    try:
        with BareClient(daemon.endpoint) as client:
            client.hello("after")
            submit(client, virtual("r"))
            assert outcome(client).state == "done"
            client.send(wire.Bye())
        assert len(shared_memory() - before) == 1
    finally:
        assert daemon.stop() == 0
    assert shared_memory() <= before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "daemon.log"]


def test_while_it_is_starting(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.kill()
    command = [sys.executable, "-m", "decoded", "serve", "--config", str(tmp_path / "config.yaml")]
    for reached in ("decoded.sock.lock", "decoded.sock"):
        (tmp_path / "decoded.sock").unlink(missing_ok=True)
        (tmp_path / "decoded.sock.lock").unlink(missing_ok=True)
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            end = time.monotonic() + 30
            while not (tmp_path / reached).exists():
                assert time.monotonic() < end
            process.kill()


def test_with_a_registration_and_a_push_under_way(daemon: DaemonProcess) -> None:
    with Proxy() as proxy, BareClient(daemon.endpoint) as client:
        client.hello("e")
        with Worker(daemon.endpoint, "e") as worker:
            worker.register("share")
            submit(client, real("r", proxy.url), virtual("v"))
            proxy.next()
            assert outcome(client).request_id == "v"
            daemon.kill()
            # The worker lives, so its memory stays; it can register with the next daemon.
            assert worker.read(0, 4) == bytes(4)
            daemon.start()
            client.send(wire.Heartbeat(1))
            assert client.expect(wire.Error, timeout_s=30).code == "hello_required"
            worker.kill()
        daemon.kill()


def test_while_it_drains(daemon: DaemonProcess) -> None:
    with Proxy() as proxy, BareClient(daemon.endpoint) as client, ExitStack() as stack:
        client.hello("e")
        worker = stack.enter_context(BareClient(daemon.endpoint))
        worker.hello("e", role="worker", session="w")
        register(worker, PoolMemory())
        submit(client, real("r", proxy.url))
        proxy.next()
        client.send(wire.Cancel([wire.Cancellation("r")]))
        barrier(client)
        assert request_of(daemon, "e", "r")["state"] == "draining"
        daemon.kill()


def test_while_it_shuts_down(daemon: DaemonProcess) -> None:
    with Proxy() as proxy, BareClient(daemon.endpoint) as client, ExitStack() as stack:
        client.hello("e")
        worker = stack.enter_context(BareClient(daemon.endpoint))
        worker.hello("e", role="worker", session="w")
        register(worker, PoolMemory())
        submit(client, real("r", proxy.url))
        proxy.next()
        os.kill(daemon.pid, signal.SIGTERM)
        until(lambda: daemon.status()["shutting_down"])
        daemon.kill()


def test_a_client_that_is_killed_leaves_the_daemon_serving(tmp_path: Path) -> None:
    with DaemonProcess(SETTINGS, tmp_path) as daemon:
        for how in ("share", "map", "run"):
            with Worker(daemon.endpoint, f"e-{how}") as worker:
                worker.register(how)
                worker.kill()
            with BareClient(daemon.endpoint) as client:
                client.hello(f"good-{how}")
                submit(client, virtual("r"))
                assert outcome(client).state == "done"


def test_of_many_daemons_that_start_at_once_one_serves(tmp_path: Path) -> None:
    daemon = DaemonProcess(CONFIG, tmp_path).start()
    daemon.kill()
    command = [sys.executable, "-m", "decoded", "serve", "--config", str(tmp_path / "config.yaml")]
    racing = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        with BareClient(daemon.endpoint, timeout_s=30) as client:
            client.send(wire.StatusQuery())
            served_by = client.expect(wire.StatusReport).status["pid"]
        losers = [each for each in racing if each.pid != served_by]
        assert len(losers) == 3
        for loser in losers:
            _, log = loser.communicate(timeout=30)
            assert loser.returncode == 4
            why = json.loads(log.splitlines()[-1])["why"]
            assert f"pid {served_by}" in why or "pid unknown" in why
    finally:
        for each in racing:
            if each.poll() is None:
                each.terminate()
                each.communicate(timeout=30)
    assert not (tmp_path / "decoded.sock").exists()
    assert not (tmp_path / "decoded.sock.lock").exists()


def test_the_port_that_a_wildcard_becomes_is_logged_and_two_can_have_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "decoded", "serve"]
    command += ["--set", "link.endpoint=tcp://127.0.0.1:*"]
    environ = {**os.environ, "RUNTIME_DIRECTORY": str(tmp_path)}
    running = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) for _ in range(2)
    ]
    try:
        endpoints = set()
        for each in running:
            assert each.stderr is not None
            ready = json.loads(each.stderr.readline())
            assert ready["event"] == "ready"
            endpoints.add(ready["endpoint"])
            with BareClient(ready["endpoint"]) as client:
                client.hello("e")
                submit(client, virtual("r"))
                assert outcome(client).state == "done"
        assert len(endpoints) == 2
    finally:
        for each in running:
            each.terminate()
            each.communicate(timeout=30)
    assert [each.returncode for each in running] == [0, 0]
    assert list(tmp_path.iterdir()) == []
