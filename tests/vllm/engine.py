"""A vLLM engine without a model: its real scheduler, connectors and aggregator, stepped by hand.

What is made up is the model: its KV is a function of layer, position and token, and each
scheduled request that has its prompt samples token 7.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from decoded.vllm.connector import DecodedConnector, TransferResults

LAYERS = 4
BLOCK_SIZE = 16
NUM_BLOCKS = 64
HEADS, HEAD_DIM = 4, 32

GROUPS = [
    1,
    pytest.param(
        2,
        marks=pytest.mark.skipif(
            TransferResults is None,
            reason="vLLM 0.27 cannot be told of a failed load in several groups",
        ),
    ),
]
"""Numbers of KV groups that a D engine can have with this vLLM."""

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def make_config(folder: Path, transfer: Mapping[str, Any], **arguments: Any) -> VllmConfig:
    """A real VllmConfig for a model of which there is only config.json."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    options: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 16,
        "block_size": BLOCK_SIZE,
        "enforce_eager": True,
        "async_scheduling": False,
        "kv_transfer_config": {
            "kv_connector": "DecodedConnector",
            "kv_connector_module_path": "decoded.vllm",
            **transfer,
        },
        **arguments,
    }
    config = EngineArgs(**options).create_engine_config()
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


def cache_config(groups: int = 1) -> KVCacheConfig:
    """One group of full attention; with two, every other layer has a sliding window."""
    shape: dict[str, Any] = {
        "block_size": BLOCK_SIZE,
        "num_kv_heads": HEADS,
        "head_size": HEAD_DIM,
        "dtype": torch.float32,
    }
    specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=64)][:groups]
    members = [[layer_name(n) for n in range(LAYERS) if n % groups == g] for g in range(groups)]
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        # Only the model runner reads these; see `make_caches`.
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec(names, spec) for names, spec in zip(members, specs, strict=True)
        ],
    )


def make_caches(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """Tensors of the CPU backend's shape. Layers of different groups share memory."""
    caches: dict[str, torch.Tensor] = {}
    for shared in zip(*(group.layer_names for group in config.kv_cache_groups), strict=True):
        cache = torch.zeros(NUM_BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
        caches.update(dict.fromkeys(shared, cache))
    return {layer_name(n): caches[layer_name(n)] for n in range(LAYERS)}


def kv_of(layer: int, rank: int, positions: range, tokens: list[int]) -> torch.Tensor:
    """What the made-up model caches, of shape (positions, 1): a number for each of them."""
    values = [tokens[at] + 1e3 * (layer + 1) + 1e5 * (rank + 1) + at / 1e4 for at in positions]
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def slots(cache: torch.Tensor, blocks: list[int], positions: range) -> list[torch.Tensor]:
    """Views of the cache's slots for these positions, each of shape (heads, 2 * head dim)."""
    return [cache[blocks[at // BLOCK_SIZE], :, at % BLOCK_SIZE] for at in positions]


def one_rank_per_process() -> None:
    """This process as the only rank of an engine, in torch's and vLLM's eyes."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)


class Engine:
    """One scheduler, `world_size` workers. `step` is one step of the engine's loop."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig, world_size: int = 1):
        self.config = config
        init_none_hash(get_hash_fn_by_name("sha256"))
        self._hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256"))
        self.caches = [make_caches(kv_cache_config) for _ in range(world_size)]
        self.group_of = {
            name: number
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            for name in group.layer_names
        }
        self.workers = [
            DecodedConnector(config, KVConnectorRole.WORKER, kv_cache_config)
            for _ in range(world_size)
        ]
        self.scheduler = Scheduler(
            config,
            kv_cache_config,
            StructuredOutputManager(config),
            BLOCK_SIZE,
            log_stats=True,
        )
        self._aggregator = KVOutputAggregator(world_size)
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.stats: list[dict[str, Any]] = []

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self, request_id: str, prompt: list[int], params: dict[str, Any] | None, tokens: int = 2
    ) -> Request:
        """A request, as the engine core hands it to the scheduler."""
        sampling = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        sampling.update_from_generation_config({}, 1023)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        outputs = [self._run(worker, scheduled) for worker in self.workers]
        output = self._aggregator.aggregate(outputs)
        assert output is not None
        for client_outputs in self.scheduler.update_from_output(scheduled, output).values():
            for one in client_outputs.outputs:
                self.tokens.setdefault(one.request_id, []).extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
            stats = client_outputs.scheduler_stats
            if stats is not None and stats.kv_connector_stats:
                self.stats.append(stats.kv_connector_stats)
        return scheduled

    def step_until(self, happened: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Step as the engine core does, which pauses for 1 ms where nothing was computed."""
        due = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < due, f"not within {timeout_s} s: {self.finished}"
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.001)

    def run(self, timeout_s: float = 30.0) -> None:
        """Until the engine has nothing left to do, blocks included."""
        self.step_until(lambda: not self.scheduler.has_requests(), timeout_s)

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def _run(self, worker: DecodedConnector, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What a model runner does around its forward pass, in vLLM's order."""
        metadata = scheduled.kv_connector_metadata
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        ids = list(scheduled.num_scheduled_tokens)
        sampled = [self._sample(request_id) for request_id in ids]
        if ids:
            self._compute(worker, scheduled)
        worker.wait_for_save()
        output = KVConnectorOutput()
        if TransferResults is None:
            sent, received = worker.get_finished(scheduled.finished_req_ids)
            output.finished_sending, output.finished_recving = sent, received
        else:
            results = worker.get_transfer_results(scheduled.finished_req_ids)
            output.finished_sending = results.finished_sending
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
        output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = worker.get_kv_connector_stats()
        worker.clear_connector_metadata()
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            prompt_logprobs_dict={},
            kv_connector_output=output,
        )

    def _compute(self, worker: DecodedConnector, scheduled: SchedulerOutput) -> None:
        """The forward pass: each layer's attention caches its KV, and then tells the connector."""
        rank = self.workers.index(worker)
        for number in range(LAYERS):
            name = layer_name(number)
            cache = self.caches[rank][name]
            group = self.group_of[name]
            for request_id, count in scheduled.num_scheduled_tokens.items():
                request = self.scheduler.requests[request_id]
                end = request.num_computed_tokens
                positions = range(end - count, end)
                blocks = self.scheduler.kv_cache_manager.get_block_ids(request_id)[group]
                values = kv_of(number, rank, positions, list(request.all_token_ids))
                for slot, value in zip(slots(cache, blocks, positions), values, strict=True):
                    slot.fill_(float(value))
            worker.save_kv_layer(name, cache, None)

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        # vLLM has counted this step's tokens as computed when it scheduled them.
        return [7] if request.num_computed_tokens >= request.num_prompt_tokens else []


@contextmanager
def running(engine: Engine) -> Iterator[Engine]:
    """Register the caches, and shut everything down afterwards."""
    try:
        for worker, caches in zip(engine.workers, engine.caches, strict=True):
            worker.register_kv_caches(caches)
        yield engine
    finally:
        engine.close()
