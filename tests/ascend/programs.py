"""What the tests' processes do: `python -m tests.ascend.programs NAME [ARGUMENT ...]`."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch_npu

from .voice import heard, say

HOST = "127.0.0.1"
npu: Any = torch_npu.npu


def devices() -> None:
    """Which devices there are, and that each holds its own memory."""
    count = npu.device_count()
    tensors = [torch.full((4,), number, device=f"npu:{number}") for number in range(count)]
    say(
        {
            "version": torch_npu.__version__,
            "available": npu.is_available(),
            "name": npu.get_device_name(0),
            "devices": [str(tensor.device) for tensor in tensors],
            "values": [tensor.tolist() for tensor in tensors],
        }
    )


def tensors(dtype_name: str) -> None:
    """Do the same to a tensor of the device and to one of the host; say where they differ."""
    dtype = getattr(torch, dtype_name)
    differences = []

    def compare(what: str, device: torch.Tensor, host: torch.Tensor) -> None:
        if not torch.equal(device.cpu(), host):
            differences.append([what, str(device.cpu()), str(host)])

    host = torch.zeros(6, 7, 5, dtype=dtype)
    device = torch.zeros(6, 7, 5, dtype=dtype, device="npu")
    compare("zeros", device, host)
    for tensor in (host, device):
        tensor.fill_(3)
        tensor[1:4, ::2, 1:] = 2
        tensor[5].zero_()
    compare("fill, slices", device, host)
    compare("transposed", device.transpose(0, 2).contiguous(), host.transpose(0, 2).contiguous())
    row = torch.arange(5).to(dtype)
    host[2:] = row
    device[2:] = row.to("npu")
    compare("broadcast", device, host)
    compare("to float32", device.to(torch.float32), host.to(torch.float32))
    copy = device.clone()
    equal = [torch.equal(copy, device)]
    copy[0, 0, 0] = 0
    equal.append(torch.equal(copy, device))
    say({"differences": differences, "equal": equal})


def share() -> None:
    """Share a tensor; then write, read or free it as told."""
    npu.set_device(0)
    tensor = torch.zeros(8, dtype=torch.int64, device="npu")
    tensor.fill_(5)
    npu.synchronize()
    storage: Any = tensor.untyped_storage()
    device, handle, *rest = storage._share_npu_()
    say([device, handle.hex(), *[_plain(each) for each in rest]])
    while (order := heard()) != "end":
        if order == "read":
            say(tensor.tolist())
        else:
            tensor.fill_(order)
            npu.synchronize()
            say("written")


def _plain(value: Any) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _bytes(value: Any) -> Any:
    return bytes.fromhex(value["bytes"]) if isinstance(value, dict) else value


def use_shared() -> None:
    """Open what `share` shares; then write or read as told."""
    npu.set_device(0)
    device, handle, *rest = heard()
    arguments = [_bytes(each) for each in rest]
    storages: Any = torch.UntypedStorage
    storage = storages._new_shared_npu(device, bytes.fromhex(handle), *arguments)
    tensor = torch.tensor([], dtype=torch.int64, device="npu").set_(storage, 0, (8,), (1,))
    say("open")
    while (order := heard()) != "end":
        if order == "read":
            say(tensor.tolist())
        else:
            tensor[2:4] = order
            npu.synchronize()
            say("written")


def touch() -> None:
    """Read device memory from the host, at data_ptr()."""
    tensor = torch.full((4,), 7, dtype=torch.uint8, device="npu")
    npu.synchronize()
    say("about to read")
    say(list(ctypes.string_at(tensor.data_ptr(), 4)))


def fill_memory(size: str) -> None:
    """Take all of a device, be refused more, and get some again after giving some back."""
    said: dict[str, Any] = {}
    kept = [torch.empty(int(size), dtype=torch.uint8, device="npu:0")]
    said["free, total"] = npu.mem_get_info(0)
    try:
        kept.append(torch.empty(int(size), dtype=torch.uint8, device="npu:0"))
    except torch.OutOfMemoryError as error:
        said["refused"] = str(error)
    other = torch.zeros(int(size), dtype=torch.uint8, device="npu:1")
    said["other device"] = other.numel()
    kept.clear()
    npu.empty_cache()
    again = torch.zeros(int(size), dtype=torch.uint8, device="npu:0")
    said["again"] = again.numel()
    say(said)


def read_late() -> None:
    """Read a tensor on the host with and without waiting for its stream."""
    tensor = torch.zeros(4, dtype=torch.int64, device="npu")
    host = torch.zeros(4, dtype=torch.int64).pin_memory()
    npu.synchronize()
    tensor.fill_(9)
    host.copy_(tensor, non_blocking=True)
    early = host.tolist()
    npu.synchronize()
    say([early, host.tolist()])


def read_across(how: str) -> None:
    """Fill on one stream and read on another, which waits for the first or does not."""
    tensor = torch.zeros(4, dtype=torch.int64, device="npu")
    host = torch.zeros(4, dtype=torch.int64).pin_memory()
    writing, reading = npu.Stream(), npu.Stream()
    npu.synchronize()
    with npu.stream(writing):
        for value in range(1, 10):
            tensor.fill_(value)
        done = npu.Event()
        done.record(writing)
    early = done.query()
    if how == "event":
        reading.wait_event(done)
    elif how == "stream":
        reading.wait_stream(writing)
    with npu.stream(reading):
        host.copy_(tensor, non_blocking=True)
    reading.synchronize()
    read = host.tolist()
    done.synchronize()
    say({"read": read, "done": [early, done.query()]})


def use_operator(name: str) -> None:
    """Use an operator of tensors that the stand-in does not have."""
    tensor = torch.zeros(4, device="npu")
    npu.synchronize()
    try:
        getattr(tensor, name)(tensor)
    except RuntimeError as error:
        say(str(error))


def pattern(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def _open_engine(device: str) -> Any:
    from mooncake.engine import TransferEngine

    npu.set_device(int(device))
    engine = TransferEngine()
    code = engine.initialize(HOST, "P2PHANDSHAKE", "ascend", "")
    assert code == 0, f"initialize answered {code}"
    return engine


def receive(device: str, size: str) -> None:
    """Offer memory; say what is in it when asked."""
    engine = _open_engine(device)
    memory = torch.zeros(int(size), dtype=torch.uint8, device="npu")
    npu.synchronize()
    assert engine.register_memory(memory.data_ptr(), memory.numel()) == 0
    say([f"{HOST}:{engine.get_rpc_port()}", memory.data_ptr()])
    while (order := heard()) != "end":
        host = memory.cpu()
        what, *arguments = order
        if what == "nonzero":
            say(int(torch.count_nonzero(host)))
        elif what == "equals pattern":
            say(torch.equal(host, pattern(int(size), *arguments)))
        else:
            memory.zero_()
            npu.synchronize()
            say("zeroed")


def send(device: str, size: str) -> None:
    """Transfer as told; say the code and how long it took."""
    engine = _open_engine(device)
    memory = pattern(int(size), 0).to("npu")
    npu.synchronize()
    assert engine.register_memory(memory.data_ptr(), memory.numel()) == 0
    here = memory.data_ptr()
    say("ready")
    while (order := heard()) != "end":
        what, peer, there, *arguments = order
        began = time.monotonic()
        code = _transfer(engine, memory, what, peer, here, there, arguments)
        say([code, time.monotonic() - began])


def _transfer(
    engine: Any,
    memory: torch.Tensor,
    what: str,
    peer: str,
    here: int,
    there: int,
    arguments: list[Any],
) -> Any:
    size = memory.numel()
    if what == "write":
        return engine.transfer_sync_write(peer, here, there, size)
    if what == "write part":
        offset, length = arguments
        return engine.transfer_sync_write(peer, here + offset, there + offset, length)
    if what == "write pieces":
        (count,) = arguments
        piece = size // count
        starts = range(0, piece * count, piece)
        return engine.batch_transfer_sync_write(
            peer, [here + at for at in starts], [there + at for at in starts], [piece] * count
        )
    if what == "read":
        memory.zero_()
        npu.synchronize()
        code = engine.transfer_sync_read(peer, here, there, size)
        return [code, torch.equal(memory.cpu(), pattern(size, 0))]
    raise ValueError(f"unknown order {what!r}")


PROGRAMS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        *(devices, fill_memory, read_across, read_late, receive, send),
        *(share, tensors, touch, use_operator, use_shared),
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
