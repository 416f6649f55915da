"""These tests run where torch_npu is installed, as `scripts/test --npu` sees to."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE_S = 300
"""Longer than other tests get: nearly all of these wait for processes that import torch."""

collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(PATIENCE_S))
