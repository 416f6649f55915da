"""Work is done later than it is asked for: a missing synchronisation shows."""

from __future__ import annotations

import pytest

from .child import run

DELAY_S = 0.05


def test_the_host_reads_a_stale_value_unless_it_waits() -> None:
    early, late = run("read_late", delay_s=DELAY_S)
    assert early == [0, 0, 0, 0]
    assert late == [9, 9, 9, 9]


def test_a_stream_reads_a_stale_value_unless_it_waits() -> None:
    said = run("read_across", "at once", delay_s=DELAY_S)
    assert said["read"] != [9, 9, 9, 9]
    assert said["done"] == [False, True]


@pytest.mark.parametrize("how", ["event", "stream"])
def test_a_stream_that_waits_for_another_reads_its_result(how: str) -> None:
    said = run("read_across", how, delay_s=DELAY_S)
    assert said["read"] == [9, 9, 9, 9]
    assert said["done"] == [False, True]
