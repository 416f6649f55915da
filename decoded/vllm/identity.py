"""Who an engine and its requests are, in the daemon's words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")


@dataclass(frozen=True)
class Engine:
    """One vLLM engine: one data parallel rank, with all its workers.

    `world_size` counts workers: `tp_size * pcp_size`. `side_channel_port`: the port wanted
    for world rank 0, by the deployed formula; None leaves it to the daemon.
    """

    engine_id: str
    world_size: int
    tp_size: int
    pcp_size: int
    dcp_size: int
    side_channel_port: int | None


DEFAULT_KV_PORT = 14579
"""vLLM's own default of `kv_port`, which nobody has chosen."""


def engine_of(vllm_config: Any) -> Engine:
    """The engine that a VllmConfig describes. Raises ValueError for one that cannot be served."""
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    if parallel.pipeline_parallel_size != 1:
        raise ValueError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: the layerwise push "
            "reaches engines whose workers hold all layers; set it to 1"
        )
    pcp = int(getattr(parallel, "prefill_context_parallel_size", 1) or 1)
    tp = int(parallel.tensor_parallel_size)
    port = _port(transfer.kv_port)
    if port is not None:
        # vllm-ascend's formula, of which this is world rank 0.
        port += int(parallel.data_parallel_rank) * pcp * tp
        if port + pcp * tp - 1 > 65535:
            raise ValueError(
                f"kv_port is {transfer.kv_port}: this engine's ports would be "
                f"{port} to {port + pcp * tp - 1}, beyond 65535"
            )
    return Engine(
        engine_id=transfer.engine_id,
        world_size=tp * pcp,
        tp_size=tp,
        pcp_size=pcp,
        dcp_size=int(getattr(parallel, "decode_context_parallel_size", 1) or 1),
        side_channel_port=port,
    )


def _port(kv_port: object) -> int | None:
    try:
        port = int(str(kv_port))
    except ValueError:
        port = 0
    if not 1 <= port <= 65535:
        raise ValueError(f"kv_port is {kv_port!r}: it has to be a port, 1 to 65535")
    return None if port == DEFAULT_KV_PORT else port


def worker_rank() -> int:
    """This worker's rank in its engine, as the side channel ports count them."""
    from vllm.distributed import parallel_state

    tp = parallel_state.get_tp_group()
    rank = int(tp.rank_in_group)
    if getattr(parallel_state, "_PCP", None) is not None:
        rank += int(parallel_state.get_pcp_group().rank_in_group) * int(tp.world_size)
    return rank


def external_id(request_id: str) -> str:
    """The id under which a request came to the engine, which is what the wire carries.

    vLLM's scheduler is told only the internal one: `InputProcessor.assign_request_id` has
    added `-` and 8 hex digits, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set. This
    undoes exactly that.
    """
    from vllm import envs

    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        return request_id
    return _SUFFIX.sub("", request_id) or request_id
