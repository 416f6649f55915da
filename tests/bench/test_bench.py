"""The benches with tiny sizes: what they print, not how fast anything was."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from decoded.bench import report, stats


def bench(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "decoded", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_control(transport: str) -> None:
    tiny = ("--rounds", "2", "--samples", "8", "--requests", "64", "--few", "10", "--many", "200")
    document = bench("control", "--transport", transport, *tiny)
    assert document["transport"] == transport
    assert document["log_level"] == "warning"
    echo, *ours = document["latencies"]
    assert echo["ratio"] is None
    assert len(ours) == 3
    for latency in document["latencies"]:
        assert 0 < latency["timing"]["p50_s"] <= latency["timing"]["p99_s"]
    for latency in ours:
        expected = latency["timing"]["p50_s"] / echo["timing"]["p50_s"]
        assert latency["ratio"]["value"] == pytest.approx(expected)
        assert len(latency["ratio"]["rounds"]) == 2
    seen = {(rate["what"], rate["in_flight"]) for rate in document["rates"]}
    whats = ("virtual", "real, from DONE")
    assert seen == {(what, n) for what in whats for n in (1, 64, 1_024)}
    assert all(rate["requests_per_s"] > 0 for rate in document["rates"])
    assert (document["scale"]["few"], document["scale"]["many"]) == (10, 200)
    assert [verdict["limit"] for verdict in document["verdicts"]] == [2, 4, 0.5, 1.5, 1.5, 4]


@pytest.mark.parametrize("order", ["scattered", "contiguous"])
def test_data(order: str) -> None:
    flags = ["--contiguous"] if order == "contiguous" else []
    document = bench("data", "--rounds", "1", "--layers", "2", "--layer-mib", "4", *flags)
    assert document["order"] == order
    sizes = [each["block_bytes"] for each in document["bandwidths"]]
    assert sizes == [16 * 1024, 128 * 1024, 1024 * 1024]
    for each in document["bandwidths"]:
        assert each["bytes_per_push"] == 2 * each["pieces"] * each["block_bytes"] == 8 * 2**20
        bare, path = each["mooncake_bytes_per_s"], each["path_bytes_per_s"]
        assert each["ratio"]["value"] == pytest.approx(path / bare)
    assert [verdict["limit"] for verdict in document["verdicts"]] == [0.95, 0.95]


def test_a_missed_target_fails_only_when_it_is_checked() -> None:
    met = report.Target("a", 1.9, "at most", 2.0)
    missed = report.Target("b", 0.4, "at least", 0.5)
    verdicts = report.judge([met, missed])
    assert [verdict.passed for verdict in verdicts] == [True, False]
    assert report.exit_code(verdicts, check=True) == 1
    assert report.exit_code(verdicts, check=False) == 0
    assert report.exit_code(verdicts[:1], check=True) == 0


def test_turns_alternate_and_ratios_are_of_medians() -> None:
    order: list[str] = []
    a, b = stats.take_turns(2, lambda: order.append("a"), lambda: order.append("b"))
    assert order == ["a", "b", "b", "a"]
    assert (a, b) == ([None, None], [None, None])
    ratio = stats.ratio([[2.0, 4.0, 9.0], [4.0]], [[2.0], [1.0, 2.0]])
    assert ratio.value == 2.0
    assert ratio.rounds == [pytest.approx(2.0), pytest.approx(4.0 / 1.5)]
    assert stats.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
