"""Tests with real vLLM: they run where it is installed, as `scripts/test --vllm` sees to."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoded.testing import DaemonProcess
from tests.edges.proxy import Proxy

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]

QUICK = {
    "link": {"heartbeat_s": 0.1, "timeout_s": 2.0},
    "transfer": {"timeout_s": 0.2},
    "deadlines": {"drain_margin_s": 0.1, "shutdown_s": 1.0},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon that soon notices what it waits for; its folder outlives a restart."""
    folder = tmp_path / "daemon"
    folder.mkdir()
    with DaemonProcess(QUICK, folder) as started:
        yield started


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A metaserver whose answers the test gives."""
    with Proxy() as started:
        yield started
