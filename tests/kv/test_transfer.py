"""Real Mooncake over loopback TCP: a writing process, and an engine under test in this one."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from decoded.kv.listener import listening_ports
from decoded.kv.regions import SharedRegion
from decoded.kv.transfer import (
    TransferEngine,
    TransferError,
    session_name,
    transfer_timeout_s,
)

from .conftest import MakeRegion
from .peer import Peer

MIB = 1 << 20


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine.open("127.0.0.1") as engine:
        yield engine


def writer(peer: Peer, name: str, size: int) -> None:
    """Make `peer` a writer whose memory of `size` bytes is all 0xAA."""
    peer.ask("create", name, size)
    peer.ask("fill_all", 0xAA)
    peer.ask("open")


def await_byte(region: SharedRegion, offset: int, value: int) -> None:
    """Until the byte has arrived: memory is all that tells how far a transfer is."""
    deadline = time.monotonic() + 30
    while region.buffer[offset] != value:
        assert time.monotonic() < deadline, "nothing arrived"
        os.sched_yield()


def arrived(region: SharedRegion) -> int:
    return bytes(region.buffer).count(0xAA)


def test_blocks_arrive_where_they_belong(
    make_region: MakeRegion, engine: TransferEngine, peer: Peer, prefix: str
) -> None:
    first, second = make_region(MIB), make_region(MIB)
    for region in (first, second):
        engine.register(region.address, region.size)
    source = SharedRegion.attach(f"{prefix}src", _create(peer, f"{prefix}src", MIB))
    source.buffer[:] = random.Random(7).randbytes(MIB)
    pieces = [
        (0, first.address + 8192, 4096),
        (500_000, second.address, 100_001),
        (9, first.address + MIB - 1, 1),
        (0, second.address + 777_777, 0),
    ]
    assert peer.ask("write", engine.session, pieces) == ""
    for offset, address, length in pieces:
        region = first if first.address <= address < first.address + MIB else second
        start = address - region.address
        assert region.buffer[start : start + length] == source.buffer[offset : offset + length]
    written = sum(piece[2] for piece in pieces)
    untouched = bytes(first.buffer).count(0) + bytes(second.buffer).count(0)
    assert untouched >= 2 * MIB - written
    source.close()


def _create(peer: Peer, name: str, size: int) -> int:
    peer.ask("create", name, size)
    peer.ask("open")
    return size


def test_nothing_outside_registered_memory_can_be_written(
    make_region: MakeRegion, engine: TransferEngine, peer: Peer, prefix: str
) -> None:
    region = make_region(MIB)
    engine.register(region.address, MIB // 2)
    writer(peer, f"{prefix}src", MIB)
    for address in (region.address - 1, region.address + MIB // 2 - 10, region.address + MIB // 2):
        text = peer.ask("write", engine.session, [(0, address, 100)])
        assert "an address is not registered there" in text
    assert arrived(region) == 0
    assert peer.ask("write", engine.session, [(0, region.address, MIB // 2)]) == ""
    engine.unregister(region.address)
    assert "failed" in peer.ask("write", engine.session, [(0, region.address, 100)])
    assert arrived(region) == MIB // 2


def test_close_fences_a_write_that_is_on_its_way(
    make_region: MakeRegion, peer: Peer, prefix: str
) -> None:
    size = 256 * MIB
    region = make_region(size)
    engine = TransferEngine.open("127.0.0.1")
    engine.register(region.address, size)
    writer(peer, f"{prefix}src", size)
    peer.tell("write", engine.session, [(0, region.address, size)])
    await_byte(region, MIB, 0xAA)
    engine.close()
    at_close = arrived(region)
    assert "failed" in peer.answer()
    assert arrived(region) == at_close < size
    # The memory may go now, and a later engine at the same address is out of the writer's reach.
    region.unlink()
    region.close()
    again = make_region(size)
    with TransferEngine.open("127.0.0.1") as fresh:
        fresh.register(again.address, size)
        assert "failed" in peer.ask("write", engine.session, [(0, again.address, 4096)])
        assert arrived(again) == 0
        assert peer.ask("write", fresh.session, [(0, again.address, 4096)]) == ""
        assert arrived(again) == 4096


def test_a_writer_killed_in_the_middle_harms_nobody(
    make_region: MakeRegion, engine: TransferEngine, prefix: str
) -> None:
    size = 256 * MIB
    region = make_region(size)
    engine.register(region.address, size)
    with Peer() as first:
        writer(first, f"{prefix}src", size)
        first.tell("write", engine.session, [(0, region.address, size)])
        await_byte(region, MIB, 0xAA)
        first.kill()
    with Peer() as second:
        writer(second, f"{prefix}src2", MIB)
        assert second.ask("write", engine.session, [(0, region.address + size - MIB, MIB)]) == ""
    assert bytes(region.buffer[-MIB:]) == b"\xaa" * MIB


def test_memory_that_its_owner_truncates_fails_the_write_only(
    engine: TransferEngine, prefix: str
) -> None:
    """The engine's worker may do anything with its shared memory; this process must live on."""
    with Peer() as owner, Peer() as source:
        owner.ask("create", f"{prefix}kv", MIB)
        region = SharedRegion.attach(f"{prefix}kv", MIB)
        engine.register(region.address, MIB)
        writer(source, f"{prefix}src", MIB)
        owner.ask("truncate", 4096)
        assert "failed" in source.ask("write", engine.session, [(0, region.address, MIB)])
        assert source.ask("write", engine.session, [(0, region.address, 4096)]) == ""
        owner.ask("unlink")
        engine.close()
        region.close()


def test_close_waits_for_this_engines_own_write(make_region: MakeRegion) -> None:
    size = 128 * MIB
    source, target = make_region(size), make_region(size)
    source.buffer[:] = b"\xaa" * size
    sender, receiver = TransferEngine.open("127.0.0.1"), TransferEngine.open("127.0.0.1")
    sender.register(source.address, size)
    receiver.register(target.address, size)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            sender.write(receiver.session, [source.address], [target.address], [size])
        except BaseException as error:  # noqa: BLE001 (shown by the assertion below)
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    await_byte(target, 0, 0xAA)
    sender.close()
    thread.join(30)
    assert errors == []
    assert arrived(target) == size
    with pytest.raises(TransferError, match="is closed"):
        sender.write(receiver.session, [], [], [])
    receiver.close()


def test_silent_peers_do_not_keep_an_engine_open(make_region: MakeRegion) -> None:
    region = make_region(4096)
    engine = TransferEngine.open("127.0.0.1")
    engine.register(region.address, 4096)
    silent = [socket.create_connection(("127.0.0.1", engine.port), 10) for _ in range(3)]
    engine.close()
    assert engine.ports.isdisjoint(listening_ports())
    for each in silent:
        each.settimeout(30)
        try:
            assert each.recv(1) == b""
        except ConnectionResetError:
            pass
        each.close()


def test_engines_leave_no_descriptor_thread_or_port_behind(make_region: MakeRegion) -> None:
    region = make_region(4096)
    process = psutil.Process()
    seen: set[int] = set()
    before: tuple[int, int] | None = None
    for _ in range(25):
        engine = TransferEngine.open("127.0.0.1")
        engine.register(region.address, region.size)
        assert engine.ports <= listening_ports()
        assert engine.ports.isdisjoint(seen), "a stale producer could reach this engine"
        seen |= engine.ports
        engine.close()
        engine.close()
        # What the first engine of a process starts for all of them stays.
        before = before or (process.num_fds(), process.num_threads())
    assert (process.num_fds(), process.num_threads()) == before
    assert seen.isdisjoint(listening_ports())


def test_registration_errors(make_region: MakeRegion, engine: TransferEngine) -> None:
    region = make_region(MIB)
    engine.register(region.address, MIB)
    for address, size in ((region.address, MIB), (region.address + 4096, 10)):
        with pytest.raises(TransferError, match=r"overlaps memory.*status -7"):
            engine.register(address, size)
    with pytest.raises(TransferError, match=r"it is empty.*status -1"):
        engine.register(region.address + 2 * MIB, 0)
    with pytest.raises(TransferError, match="no memory is registered"):
        engine.unregister(region.address + 4096)
    assert engine.regions == {region.address: MIB}
    engine.unregister(region.address)
    engine.register(region.address, 4096)
    with TransferEngine.open("127.0.0.1") as other:
        other.register(region.address, MIB)
        assert other.port != engine.port


def test_write_errors(engine: TransferEngine) -> None:
    with pytest.raises(TransferError, match="2 sources, 1 destinations and 1 lengths"):
        engine.write(engine.session, [1, 2], [1], [1])
    with pytest.raises(TransferError, match="integers from 0 on"):
        engine.write(engine.session, [-1], [1], [1])
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        session = session_name("127.0.0.1", unused.getsockname()[1])
        with pytest.raises(TransferError, match=f"1 pieces, 5 bytes in all, to {session} failed"):
            engine.write(session, [0], [0], [5])


def test_an_error_kept_by_the_caller_does_not_keep_the_engine_open() -> None:
    engine = TransferEngine.open("127.0.0.1")
    kept: list[BaseException] = []
    for src in ([-1], [1]):
        with pytest.raises(TransferError) as caught:
            engine.write(engine.session, src, [1], [1])
        kept.append(caught.value)
    engine.close()
    assert len(kept) == 2
    assert engine.ports.isdisjoint(listening_ports())


@pytest.mark.parametrize(
    ("host", "protocol", "device", "text"),
    [
        ("127.0.0.1", "udp", "", "unknown protocol 'udp'"),
        ("", "tcp", "", "'' is no host name"),
        ("a b", "tcp", "", "'a b' is no host name"),
    ],
)
def test_open_errors(host: str, protocol: str, device: str, text: str) -> None:
    with pytest.raises(TransferError, match=text):
        TransferEngine.open(host, protocol, device)


def open_elsewhere(*protocols: str) -> list[str]:
    """What opening engines of these protocols, one after the other, says in a fresh process."""
    code = (
        "import sys; from decoded.kv.transfer import TransferEngine, TransferError\n"
        "for protocol in sys.argv[1:]:\n"
        "    try: TransferEngine.open('127.0.0.1', protocol, 'mlx5_77').close(); print('ok')\n"
        "    except TransferError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *protocols],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.splitlines()


def test_protocols_that_this_machine_cannot_speak() -> None:
    ascend, rdma, tcp, late = open_elsewhere("ascend", "rdma", "tcp", "rdma")
    assert "ascend needs mooncake-transfer-engine-npu" in ascend
    assert "no RDMA device" in rdma
    assert tcp == "ok"
    assert "runs Mooncake with protocol tcp already" in late


def test_time_outs_follow_mooncakes_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    assert transfer_timeout_s() == 30
    assert transfer_timeout_s(2 * 10**9) == 32
    for text, seconds in (("60", 60), ("1", 5), ("soon", 5)):
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", text)
        assert transfer_timeout_s() == seconds


def test_session_names() -> None:
    assert session_name("10.0.0.1", 15001) == "10.0.0.1:15001"
    assert session_name("fd00::1", 15001) == "[fd00::1]:15001"


def test_it_writes_over_ipv6() -> None:
    """In a process of its own: Mooncake reads the switch once, when it is loaded."""
    program = """
import ctypes, mmap
from decoded.kv.transfer import TransferEngine
with TransferEngine.open("::1") as sender, TransferEngine.open("::1") as receiver:
    memory = mmap.mmap(-1, 8192)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    sender.register(start, 4096)
    receiver.register(start + 4096, 4096)
    memory[:4] = b"abcd"
    sender.write(receiver.session, [start], [start + 4096], [4])
    assert memory[4096:4100] == b"abcd"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
