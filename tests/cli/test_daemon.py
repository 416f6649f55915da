"""Commands against a running daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoded import __version__
from decoded.cli import CANNOT_START, FAILED, NO_DAEMON, OK
from decoded.client import Client, Submission

from .conftest import Run, Served

CONFIGS = Path(__file__).parents[2] / "configs"
# Nothing listens on port 1 of the loopback: no prefill can begin.
REAL = ("--metaserver", "http://127.0.0.1:1/m", "--block-ids", "1-3", "--prompt-tokens", "40")
POOL = json.dumps(
    {
        "groups": [{"block_size": 16, "num_blocks": 8}],
        "layers": [{"name": "layers.{}", "count": 2, "tensors": [{"block_len": 512}]}],
    }
)


def outcome(said: Any) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(said.stdout)
    return value


def test_a_virtual_request(run: Run, endpoint: str) -> None:
    args = ("submit", "--virtual", "--endpoint", endpoint, "--request-id", "r-1")
    said = run(*args, "--json")
    assert said.returncode == OK, said.stderr
    ended = outcome(said)
    assert (ended["request_id"], ended["state"], ended["reason"]) == ("r-1", "done", "virtual")
    assert run(*args).stdout.startswith("r-1 done (virtual) after ")


def test_a_real_request_without_a_proxy(run: Run, serve: Callable[..., Served]) -> None:
    quick = ("--set", "metaserver.retries=0", "--set", f"kv.pool={POOL}")
    served = serve(*quick)
    said = run("submit", "--pool", *REAL, "--endpoint", served.endpoint, "--json")
    assert said.returncode == FAILED, said.stderr
    ended = outcome(said)
    assert (ended["state"], ended["reason"]) == ("failed", "prefill_failed")
    assert "127.0.0.1:1" in ended["detail"]
    assert served.stop() == OK


def test_a_real_request_without_memory(run: Run, serve: Callable[..., Served]) -> None:
    served = serve("--set", "deadlines.registration_s=0.1")
    said = run("submit", *REAL, "--endpoint", served.endpoint, "--json")
    assert said.returncode == FAILED, said.stderr
    assert outcome(said)["reason"] == "kv_not_registered"
    said = run("submit", "--pool", *REAL, "--endpoint", served.endpoint)
    assert said.returncode == FAILED
    assert "kv.pool" in said.stderr


def test_no_outcome_in_time(run: Run, endpoint: str) -> None:
    said = run("submit", *REAL, "--endpoint", endpoint, "--timeout", "0.2", "--request-id", "r")
    assert said.returncode == FAILED
    assert "no outcome of r within 0.2 s; gave it up" in said.stderr


def test_a_seat_that_is_taken(run: Run, endpoint: str) -> None:
    with Client(endpoint, "mine") as client:
        client.wait_connected()
        said = run("submit", "--virtual", "--endpoint", endpoint, "--engine-id", "mine")
    assert said.returncode == FAILED
    assert "seat_taken" in said.stderr


def test_status(run: Run, endpoint: str) -> None:
    with Client(endpoint, "engine-1") as client:
        real = {"metaserver": "http://127.0.0.1:1/m"}
        waiting = Submission("waits", "ext", [[1, 2]], 40, kv_transfer_params=real)
        client.submit(waiting, Submission("v", "v", [[]], 0, do_virtual=True))
        assert [ended.request_id for ended in client.wait(10)] == ["v"]
        said = run("status", "--json", "--endpoint", endpoint)
        table = run("status", "--endpoint", endpoint, "--request-id", "waits", COLUMNS="200")
        other = run("status", "--json", "--endpoint", endpoint, "--engine-id", "engine-2")
    assert said.returncode == table.returncode == other.returncode == OK
    status = json.loads(said.stdout)
    assert (status["version"], status["endpoint"]) == (__version__, endpoint)
    assert [engine["engine_id"] for engine in status["engines"]] == ["engine-1"]
    assert [request["request_id"] for request in status["requests"]] == ["waits"]
    assert json.loads(other.stdout)["requests"] == []
    for text in (endpoint, "engine-1", "waits", "accepted", "story of waits"):
        assert text in table.stdout


def test_serve_with_the_published_configuration(serve: Callable[..., Served], folder: Path) -> None:
    served = serve("--config", CONFIGS / "cpu.yaml")
    assert served.stop() == OK
    assert [line["event"] for line in served.lines] == ["ready", "stopping", "stopped"]
    assert served.lines[0]["endpoint"] == served.endpoint
    assert list(folder.iterdir()) == []


def test_one_line_per_request(run: Run, serve: Callable[..., Served]) -> None:
    served = serve("--log-format", "json")
    run(
        "submit",
        "--virtual",
        "--endpoint",
        served.endpoint,
        "--request-id",
        "r",
        "--engine-id",
        "e",
    )
    assert served.stop() == OK
    about = [line for line in served.lines if line.get("request_id") == "r"]
    assert [(line["level"], line["engine_id"]) for line in about] == [("info", "e")]


def test_warnings_are_logged(serve: Callable[..., Served]) -> None:
    served = serve("--set", "metaserver.total_timeout_s=301")
    assert served.lines[0]["level"] == "warning"
    assert served.lines[0]["key"] == "metaserver.total_timeout_s"


def test_a_second_daemon_names_the_first(run: Run, serve: Callable[..., Served]) -> None:
    served = serve()
    said = run("serve", "--endpoint", served.endpoint)
    assert said.returncode == CANNOT_START
    assert f"pid {served.process.pid}" in said.stderr


@pytest.mark.parametrize("command", [("status",), ("submit", "--virtual")])
def test_a_dead_daemons_socket(
    run: Run, serve: Callable[..., Served], command: tuple[str, ...]
) -> None:
    served = serve()
    served.process.kill()
    served.process.wait(30)
    said = run(*command, "--endpoint", served.endpoint)
    assert said.returncode == NO_DAEMON
    assert "the daemon that made the socket is gone" in said.stderr
