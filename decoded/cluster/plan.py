"""What a cluster consists of, and the command line and environment of each of its processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import decoded

from .ports import HOST

Policy = Literal["recompute", "fail"]

_CONFIG = Path(decoded.__file__).parents[1] / "configs" / "cpu.yaml"
# The longest that a write may last, of P engines and daemon alike: short, so that a P engine's
# death is over soon.
_TRANSFER_S = 5


@dataclass(frozen=True)
class Plan:
    """A cluster's size and its engines' settings; the same settings for all of them.

    `p`, `d`: engines of each side. `tp`: ranks of each engine. `policy`: what D engines do
    about a KV load that failed. `block_size`, `step_tokens` (most tokens that an engine
    computes per step: longer prompts are prefilled in chunks), `context_tokens` as vLLM
    means them. `kv_gib`: KV cache of each engine.
    """

    model: Path
    p: int = 1
    d: int = 1
    tp: int = 1
    policy: Policy = "recompute"
    block_size: int = 32
    step_tokens: int = 512
    context_tokens: int = 2048
    kv_gib: int = 1

    @property
    def model_name(self) -> str:
        """What requests call the model."""
        return self.model.name

    def engine_command(self, port: int, kv_transfer: Mapping[str, Any] | None) -> list[str]:
        """A vLLM engine's command line. `kv_transfer`: its --kv-transfer-config, if any."""
        flags: dict[str, object] = {
            "model": self.model,
            "served-model-name": self.model_name,
            "host": HOST,
            "port": port,
            "dtype": "float32",
            "block-size": self.block_size,
            "max-model-len": self.context_tokens,
            "max-num-batched-tokens": self.step_tokens,
            "tensor-parallel-size": self.tp,
            "uvicorn-log-level": "warning",
        }
        if kv_transfer is not None:
            flags["kv-transfer-config"] = json.dumps(kv_transfer)
        # Eager: compiling takes longer than the whole acceptance.
        switches = ("--enable-prefix-caching", "--enable-chunked-prefill", "--enforce-eager")
        module = "vllm.entrypoints.openai.api_server"
        return [sys.executable, "-m", module, *command_flags(flags), *switches]

    def engine_environ(self, cores: str) -> dict[str, str]:
        """`cores`: VLLM_CPU_OMP_THREADS_BIND."""
        return _environ(
            {
                "HF_HUB_OFFLINE": "1",
                "MC_TCP_ENABLE_CONNECTION_POOL": "1",
                "MC_TRANSFER_TIMEOUT": str(_TRANSFER_S),
                # Eager means it: compiling on two cores takes minutes of an engine's first step.
                "TORCHDYNAMO_DISABLE": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_HOST_IP": HOST,
                "VLLM_NO_USAGE_STATS": "1",
                # /reset_prefix_cache, which the acceptance needs.
                "VLLM_SERVER_DEV_MODE": "1",
            }
        )

    def p_transfer(self) -> dict[str, Any]:
        """--kv-transfer-config of a P engine."""
        return {
            "kv_connector": "DecodedConnector",
            "kv_connector_module_path": "decoded.vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"host": HOST},
        }

    def d_transfer(self, endpoint: str) -> dict[str, Any]:
        """--kv-transfer-config of a D engine whose daemon is at `endpoint`."""
        return {
            "kv_connector": "DecodedConnector",
            "kv_connector_module_path": "decoded.vllm",
            "kv_role": "kv_consumer",
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"endpoint": endpoint},
        }


def daemon_command(endpoint: str, virtual_delay_s: float = 0.0) -> list[str]:
    """The daemon's command line. `virtual_delay_s`: what virtual requests wait."""
    settings: dict[str, object] = {
        "link.endpoint": endpoint,
        "transfer.timeout_s": _TRANSFER_S,
        "log.format": "json",
    }
    if virtual_delay_s:
        settings["virtual.delay.fixed_s"] = virtual_delay_s
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return [sys.executable, "-m", "decoded", "serve", "--config", str(_CONFIG), *changes]


def proxy_command(port: int, p: Sequence[str], d: Sequence[str]) -> list[str]:
    """The proxy's command line. `p`, `d`: its engines' addresses; without P all is virtual."""
    engines = [*(("--prefill", url) for url in p), *(("--decode", url) for url in d)]
    listen = ("--host", HOST, "--port", str(port))
    flags = [part for pair in engines for part in pair]
    virtual = [] if p else ["--virtual"]
    return [sys.executable, "-m", "decoded", "proxy", *listen, *flags, *virtual]


def daemon_environ() -> dict[str, str]:
    """The daemon's environment, and the proxy's."""
    return _environ({})


def _environ(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would configure a daemon or proxy, and `changes`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DECODED_", "VLLM_"))}
    return kept | dict(changes)


def command_flags(flags: Mapping[str, object]) -> Sequence[str]:
    """`flags` as they are written on a command line."""
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]
