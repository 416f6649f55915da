"""Mooncake's `ascend` transport between two processes, and what can go wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .child import Child

MIB = 1 << 20
SIZE = 3 * MIB + 5
"""More than one chunk of the stand-in's connection, and no whole number of them."""
DIED = 86
TIMEOUT_MS = 1500


@contextmanager
def pair(**settings: Any) -> Iterator[tuple[Child, Child, list[Any]]]:
    """A receiver on device 1, a sender on device 0 with `settings`, and the receiver's address."""
    with Child("receive", 1, SIZE) as receiver, Child("send", 0, SIZE, **settings) as sender:
        where = receiver.hear()
        assert sender.hear() == "ready"
        yield receiver, sender, where


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_bytes_arrive(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mooncake calls TransferSync, or TransferAsync and GetTransferStatus if told so."""
    if asynchronous:
        monkeypatch.setenv("ASCEND_USE_ASYNC_TRANSFER", "1")
    with pair() as (receiver, sender, where):
        assert receiver.ask(["nonzero"]) == 0
        code, _ = sender.ask(["write", *where])
        assert code == 0
        assert receiver.ask(["equals pattern", 0]) is True


def test_a_batch_of_pieces_arrives() -> None:
    with pair() as (receiver, sender, where):
        code, _ = sender.ask(["write pieces", *where, SIZE // 4099])
        assert code == 0
        rest, _ = sender.ask(["write part", *where, SIZE - 4099, 4099])
        assert rest == 0
        assert receiver.ask(["equals pattern", 0]) is True


def test_a_read_brings_the_bytes_back() -> None:
    with pair() as (_, sender, where):
        code, _ = sender.ask(["write", *where])
        assert code == 0
        (code, same), _ = sender.ask(["read", *where])
        assert (code, same) == (0, True)


@pytest.mark.parametrize("offset", [SIZE, SIZE - 1, -1])
def test_memory_that_is_not_registered_is_refused(offset: int) -> None:
    with pair() as (receiver, sender, (peer, there)):
        code, _ = sender.ask(["write part", peer, there, offset, 4096])
        assert code == -1
        assert "not registered" in sender.errors() + receiver.errors()
        assert "(103900)" in sender.errors()
        assert receiver.ask(["nonzero"]) == 0
        code, _ = sender.ask(["write", peer, there])
        assert code == 0


def test_a_refused_connection_fails_the_transfer() -> None:
    with pair(fault="refuse") as (receiver, sender, where):
        code, _ = sender.ask(["write", *where])
        assert code == -1
        assert "no connection to" in sender.errors()
        assert receiver.ask(["nonzero"]) == 0


def test_a_stalled_transfer_lasts_until_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", str(TIMEOUT_MS))
    with pair(fault="stall") as (receiver, sender, where):
        code, took_s = sender.ask(["write", *where])
        assert code == -1
        assert took_s >= TIMEOUT_MS / 1000
        assert receiver.ask(["nonzero"]) == 0


def test_the_transfer_that_is_named_fails() -> None:
    """Mooncake tries a transfer twice: one failure alone does not show."""
    with pair(fault="fail 2-3") as (receiver, sender, where):
        assert sender.ask(["write", *where])[0] == 0
        assert receiver.ask(["zero"]) == "zeroed"
        assert sender.ask(["write", *where])[0] == -1
        assert receiver.ask(["nonzero"]) == 0
        assert sender.ask(["write", *where])[0] == 0
        assert receiver.ask(["equals pattern", 0]) is True


def test_a_sender_that_dies_leaves_a_part_of_the_bytes() -> None:
    with pair(fault="die 2") as (receiver, sender, where):
        assert sender.ask(["write", *where])[0] == 0
        assert receiver.ask(["zero"]) == "zeroed"
        sender.tell(["write", *where])
        assert sender.wait() == DIED
        whole = SIZE * 255 // 256  # of random bytes, one in 256 is zero
        assert 0 < receiver.ask(["nonzero"]) < whole * 3 // 4


def test_a_fault_comes_and_goes_while_the_process_runs(tmp_path: Path) -> None:
    control = tmp_path / "fault"
    with pair(fault_file=control) as (_, sender, where):
        assert sender.ask(["write", *where])[0] == 0
        control.write_text("fail")
        assert sender.ask(["write", *where])[0] == -1
        control.unlink()
        assert sender.ask(["write", *where])[0] == 0


def test_a_receiver_that_is_gone_fails_the_transfer() -> None:
    with pair() as (receiver, sender, where):
        assert sender.ask(["write", *where])[0] == 0
        receiver.tell("end")
        assert receiver.wait() == 0
        assert sender.ask(["write", *where])[0] == -1
