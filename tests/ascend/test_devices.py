"""torch_npu itself over the stand-in: devices, tensors, memory."""

from __future__ import annotations

import signal

import pytest

from .child import Child, run

MIB = 1 << 20


def test_two_devices_hold_their_own_memory() -> None:
    said = run("devices", devices=2)
    assert said["version"].startswith("2.13.0")
    assert said["available"] is True
    assert said["name"] == "Ascend910B1"
    assert said["devices"] == ["npu:0", "npu:1"]
    assert said["values"] == [[0, 0, 0, 0], [1, 1, 1, 1]]


def test_a_process_sees_the_visible_devices_only() -> None:
    said = run("devices", devices=4, visible=[3, 1, 0])
    assert said["devices"] == ["npu:0", "npu:1", "npu:2"]


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32"]
)
def test_a_device_tensor_does_what_the_hosts_does(dtype: str) -> None:
    said = run("tensors", dtype)
    assert said == {"differences": [], "equal": [True, False]}


def test_the_host_faults_on_device_memory() -> None:
    with Child("touch") as child:
        assert child.hear() == "about to read"
        assert child.wait() == -signal.SIGSEGV


def test_without_the_guard_the_host_reads_device_memory() -> None:
    with Child("touch", guard=False) as child:
        assert child.hear() == "about to read"
        assert child.hear() == [7, 7, 7, 7]
        assert child.wait() == 0


def test_a_device_runs_out_of_memory_alone_and_recovers() -> None:
    size = 60 * MIB - 32  # torch_npu adds 32 bytes and takes whole MiB
    said = run("fill_memory", size, memory_bytes=100 * MIB)
    assert said["free, total"] == [40 * MIB, 100 * MIB]
    assert "out of memory" in said["refused"]
    assert said["other device"] == said["again"] == size
