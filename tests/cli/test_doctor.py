"""`decoded doctor`: what it says of this machine, and of one with problems.

`--npu` is tested in tests/ascend.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decoded.cli import FAILED, OK, USAGE
from decoded.doctor import clock, memory
from decoded.doctor.report import Findings
from decoded.kv.regions import SHM

from .conftest import Run, Served, environment

POOL = {
    "groups": [{"block_size": 16, "num_blocks": 8}],
    "layers": [{"name": "layers.{}", "count": 2, "tensors": [{"block_len": 512}]}],
}


def rows(said: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """Findings by what was looked at."""
    assert said.stdout, said.stderr
    return {row["what"]: row for row in json.loads(said.stdout)["rows"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def doctor(run: Run, folder: Path) -> Run:
    """`decoded doctor --json` for an endpoint that nobody serves."""

    def doctor(*args: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return run("doctor", "--json", "--endpoint", f"ipc://{folder}/d.sock", *args, **variables)

    return doctor


def test_a_machine_without_problems(doctor: Run) -> None:
    before = set(SHM.iterdir())
    said = doctor("--set", f"kv.pool={json.dumps(POOL)}")
    assert said.returncode == OK, said.stdout
    assert json.loads(said.stdout)["good"] is True
    found = rows(said)
    assert "bad" not in {row["grade"] for row in found.values()}
    assert "8 MiB within 127.0.0.1, every byte compared" in found["transfer over tcp"]["found"]
    assert "kv.pool takes 0.00 GiB" in found["shared memory"]["found"]
    assert "pyzmq" in found["libraries"]["found"]
    assert found["daemon"]["found"] == "none runs with this configuration"
    assert {path for path in SHM.iterdir() if "doctor" in path.name} <= before


def test_the_table(run: Run, folder: Path) -> None:
    said = run("doctor", "--endpoint", f"ipc://{folder}/d.sock")
    assert said.returncode == OK
    assert said.stdout.endswith("No problem was found.\n")
    said = run("doctor", "--endpoint", "ipc:///nowhere/d.sock")
    assert said.returncode == FAILED
    assert "1 problem; see → above." in said.stdout
    assert "→ make it, or set link.endpoint" in said.stdout


def test_a_running_daemon_is_no_problem(run: Run, serve: Callable[..., Served]) -> None:
    ports = (
        "--set",
        f"side_channel.base_port={free_port()}",
        "--set",
        f"kv.pool={json.dumps(POOL)}",
    )
    served = serve(*ports)
    said = run("doctor", "--json", "--endpoint", served.endpoint, *ports)
    assert said.returncode == OK, said.stdout
    found = rows(said)
    assert f"pid {served.process.pid}" in found["daemon"]["found"]
    assert "the running daemon's" in found["engine link"]["found"]
    assert "which the running daemon has" in found["shared memory"]["found"]
    assert found["side channels"]["grade"] in ("ok", "note")
    assert served.stop() == OK


def test_a_taken_port_is_named_with_its_holder(doctor: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        said = doctor("--set", f"side_channel.base_port={port}")
        linked = doctor(
            "--set",
            f"link.endpoint=tcp://127.0.0.1:{port}",
            "--endpoint",
            f"tcp://127.0.0.1:{port}",
        )
    assert said.returncode == linked.returncode == FAILED
    row = rows(said)["side channels"]
    assert row["grade"] == "bad"
    assert f"port {port} on 127.0.0.1 is taken by python" in row["found"]
    assert "base_port" in row["remedy"]
    assert f"port {port} on 127.0.0.1 is taken by python" in rows(linked)["engine link"]["found"]


def test_an_address_of_another_machine(doctor: Run) -> None:
    said = doctor("--set", "side_channel.bind_host=192.0.2.1")
    assert said.returncode == FAILED
    found = rows(said)
    assert "this machine cannot listen on 192.0.2.1" in found["side channels"]["found"]
    assert found["transfer over tcp"]["grade"] == "bad"
    assert "192.0.2.1" in found["transfer over tcp"]["remedy"]


def test_ports_that_linux_gives_away(doctor: Run) -> None:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    port = next(p for p in iter(free_port, None) if int(low) <= p <= int(high))
    row = rows(doctor("--set", f"side_channel.base_port={port}"))["side channels"]
    assert row["grade"] == "note"
    assert row["remedy"].startswith(f"sysctl net.ipv4.ip_local_reserved_ports={port}-{port}")


def test_a_pool_that_does_not_fit(doctor: Run) -> None:
    pool = {**POOL, "groups": [{"block_size": 16, "num_blocks": 2**32}]}
    said = doctor("--set", f"kv.pool={json.dumps(pool)}")
    assert said.returncode == FAILED
    row = rows(said)["shared memory"]
    assert row["grade"] == "bad"
    assert "kv.pool takes 4096.00 GiB" in row["found"]
    assert "--shm-size" in row["remedy"]


def test_what_dead_processes_left() -> None:
    # Not with this package's own prefix: any daemon of this machine would remove it.
    name = f"/test-doctor-{os.getpid()}"
    code = (
        "import os\n"
        "from decoded.kv.regions import SharedRegion\n"
        f"region = SharedRegion.create('{name}', 4096)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
    findings = Findings()
    try:
        memory.look_at_stale_memory(findings, name)
    finally:
        (SHM / name[1:]).unlink()
    memory.look_at_stale_memory(findings, name)
    [row] = findings.rows
    assert row.grade == "note"
    assert name in row.found


def test_few_descriptors(folder: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, 1_024))

    said = subprocess.run(
        [sys.executable, "-m", "decoded", "doctor", "--json", "--endpoint", f"ipc://{folder}/d"],
        env=environment(),
        preexec_fn=few,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    row = rows(said)["open files"]
    assert row["grade"] == "note"
    assert "about 512 prefills" in row["found"]
    assert "LimitNOFILE" in row["remedy"]


def test_two_wheels(doctor: Run, tmp_path: Path) -> None:
    info = tmp_path / "mooncake_transfer_engine-0.3.13.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: mooncake-transfer-engine\nVersion: 0.3.13\n")
    said = doctor(PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[2]}")
    assert said.returncode == FAILED
    assert "2 Mooncake wheels are installed" in rows(said)["Mooncake"]["found"]


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="this machine has RDMA")
def test_rdma_without_a_card(doctor: Run) -> None:
    found = rows(doctor("--set", "transfer.protocol=rdma"))
    assert "no RDMA device" in found["transfer over rdma"]["found"]
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = "ok" if soft == resource.RLIM_INFINITY else "bad"
    assert found["locked memory"]["grade"] == wanted


def test_ascend_without_its_wheel(doctor: Run) -> None:
    said = doctor("--set", "transfer.protocol=ascend")
    assert said.returncode == FAILED
    found = rows(said)
    assert "does not speak transfer.protocol ascend" in found["Mooncake"]["found"]
    assert "install mooncake-transfer-engine-npu" in found["Mooncake"]["remedy"]
    assert {"driver", "CANN"} <= found.keys()


def test_a_wrong_configuration(doctor: Run) -> None:
    said = doctor("--set", "link.timeout_s=0")
    assert (said.returncode, said.stdout) == (USAGE, "")
    assert "link.timeout_s" in said.stderr


def test_warnings_of_the_configuration(doctor: Run) -> None:
    row = rows(doctor("--set", "metaserver.total_timeout_s=301"))["configuration"]
    assert row["grade"] == "note"
    assert "metaserver.total_timeout_s" in row["found"]


@pytest.mark.parametrize(
    ("discipline", "grade", "found"),
    [
        (clock.Discipline(True, 0.002), "ok", "at most 2.0 ms off"),
        (clock.Discipline(True, 0.5), "note", "500 ms off"),
        (clock.Discipline(False, 16.0), "note", "not synchronised"),
    ],
)
def test_the_clock(discipline: clock.Discipline, grade: str, found: str) -> None:
    findings = Findings()
    clock.judge(findings, discipline)
    [row] = findings.rows
    assert row.grade == grade
    assert found in row.found


def test_the_kernel_says_how_its_clock_is() -> None:
    """What timedatectl shows, it takes from the same call."""
    assert clock.read_discipline().error_s > 0
