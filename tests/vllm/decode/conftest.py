from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from decoded.testing import DaemonProcess
from tests.vllm.engine import Engine, cache_config, make_config, one_rank_per_process, running

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(
    daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeEngine]:
    """Engines on `daemon`, by KV groups, ranks, failure policy and settings; closed at the end."""
    one_rank_per_process()
    with ExitStack() as stack:

        def make(
            groups: int = 1, ranks: int = 1, policy: str = "recompute", **settings: Any
        ) -> Engine:
            folder = tmp_path / "model"
            folder.mkdir(exist_ok=True)
            config = make_config(
                folder,
                {
                    "kv_role": "kv_consumer",
                    "kv_load_failure_policy": policy,
                    "kv_connector_extra_config": {"endpoint": daemon.endpoint, **settings},
                },
            )
            # One process stands for all ranks here.
            config.parallel_config.tensor_parallel_size = ranks
            taken = iter(range(ranks))
            monkeypatch.setattr("decoded.vllm.decode.worker.worker_rank", lambda: next(taken))
            return stack.enter_context(running(Engine(config, cache_config(groups), ranks)))

        yield make
