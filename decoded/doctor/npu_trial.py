"""One trial on NPUs, in a process that may die of it: `python -m decoded.doctor.npu_trial NAME`.

It prints one line of JSON, or fails with a line `error: why` on standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import msgspec

from decoded.kv.errors import RegionError
from decoded.kv.npu import NpuRegion, machine_number
from decoded.kv.transfer import TransferEngine, TransferError
from decoded.wire.layout import Region

from .trial import ERROR, why

HOST = "127.0.0.1"
SIZE = 8 << 20
_PATTERN, _OTHER = 0x5A, 0xA5


def devices() -> list[dict[str, Any]]:
    """Which NPUs this process sees, and their memory in bytes."""
    import torch_npu

    found = []
    for index in range(torch_npu.npu.device_count()):
        torch_npu.npu.set_device(index)
        free, total = torch_npu.npu.mem_get_info(index)
        name = torch_npu.npu.get_device_name(index)
        number = machine_number(index)
        found.append({"number": number, "name": name, "free": free, "total": total})
    return found


def own(number: int) -> dict[str, Any]:
    """Mooncake writes from one place of an NPU to another of the same."""
    with _Side(number) as source, _Side(number) as target:
        return _transfer(source, target)


def between(sender: int, receiver: int) -> dict[str, Any]:
    """Mooncake writes to another NPU, whose engine is in a process of its own."""
    command = [sys.executable, "-m", __spec__.name, "receive", str(receiver)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        where = json.loads(peer.stdout.readline() or "null")
        if where is None:
            raise RegionError(f"nothing could be received on NPU {receiver}; see above")
        began = time.monotonic()
        with _Side(sender) as source:
            source.fill(_PATTERN)
            source.engine.write(where["session"], [source.address], [where["address"]], [SIZE])
        seconds = time.monotonic() - began
        peer.stdin.close()
        if peer.wait() != 0:
            raise TransferError("what arrived is not what was sent")
    return _said(seconds)


def receive(number: int) -> dict[str, Any]:
    """The other side of `between`: says where, waits, compares."""
    with _Side(number) as target:
        where = {"session": target.engine.session, "address": target.address}
        sys.stdout.write(json.dumps(where) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        target.compare(_PATTERN)
    return {}


def shared(number: int) -> dict[str, Any]:
    """Another process maps memory of this one, lets Mooncake write there, and both see it."""
    region = NpuRegion.create("doctor", SIZE, number)
    _fill(region, 0)
    began = time.monotonic()
    handle = msgspec.json.encode(region.share()).decode()
    command = [sys.executable, "-m", __spec__.name, "map", handle, str(region.begin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RegionError(why(done))
    _compare(region, _PATTERN)
    return _said(time.monotonic() - began)


def map_and_write(handle: str, begin: int) -> dict[str, Any]:
    """The other side of `shared`: as the daemon does, and as a producer writes to it."""
    region = NpuRegion.attach(msgspec.json.decode(handle, type=Region))
    with TransferEngine.open(HOST, "ascend") as engine, _Side(region.device) as source:
        engine.register(region.address + begin, SIZE)
        source.fill(_PATTERN)
        source.engine.write(engine.session, [source.address], [region.address + begin], [SIZE])
    region.close()
    return {}


class _Side:
    """Memory of an NPU, and a Mooncake engine that has it registered."""

    def __init__(self, number: int) -> None:
        self._region = NpuRegion.create("doctor", SIZE, number)
        self.address = self._region.address + self._region.begin
        self.engine = TransferEngine.open(HOST, "ascend")
        self.engine.register(self.address, SIZE)

    def fill(self, byte: int) -> None:
        _fill(self._region, byte)

    def compare(self, byte: int) -> None:
        _compare(self._region, byte)

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self._region.close()


def _transfer(source: _Side, target: _Side) -> dict[str, Any]:
    source.fill(_PATTERN)
    target.fill(_OTHER)
    began = time.monotonic()
    source.engine.write(target.engine.session, [source.address], [target.address], [SIZE])
    seconds = time.monotonic() - began
    target.compare(_PATTERN)
    return _said(seconds)


def _fill(region: NpuRegion, byte: int) -> None:
    import torch
    import torch_npu

    region.tensor(region.begin, (SIZE,), torch.uint8).fill_(byte)
    torch_npu.npu.synchronize()


def _compare(region: NpuRegion, byte: int) -> None:
    import torch

    if not region.tensor(region.begin, (SIZE,), torch.uint8).cpu().eq(byte).all():
        raise TransferError("what arrived is not what was sent")


def _said(seconds: float) -> dict[str, Any]:
    return {"mib": SIZE >> 20, "seconds": seconds}


def main(name: str, *arguments: str) -> int:
    voice = os.fdopen(os.dup(1), "w")
    if name != "receive":
        os.dup2(2, 1)  # torch_npu prints warnings on standard output
    try:
        if name == "map":
            said: Any = map_and_write(arguments[0], int(arguments[1]))
        else:
            trial: Any = {
                "devices": devices,
                "own": own,
                "between": between,
                "receive": receive,
                "shared": shared,
            }[name]
            said = trial(*map(int, arguments))
    except (RegionError, TransferError, ImportError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.write(f"{ERROR}{text}\n")
        return 1
    voice.write(json.dumps(said) + "\n")
    voice.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
