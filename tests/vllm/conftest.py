"""Tests with real vLLM: they run where it is installed, as `scripts/test --vllm` sees to."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]
