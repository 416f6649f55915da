"""These tests run where torch_npu is installed, as `scripts/test --npu` sees to."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch_npu") else ["test_*.py"]
