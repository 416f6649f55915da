"""What Mooncake needs of the configuration, and how long its writes last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from decoded.kv.ascend import AscendSettings, ascend_environment, ascend_timeout_s

if TYPE_CHECKING:
    from .schema import Config

TRANSFER_TIMEOUT_S = 30.0
"""Mooncake's own default with tcp and rdma."""


def transfer_environment(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are to be set before Mooncake is loaded. Raises ValueError."""
    if config.transfer.protocol != "ascend":
        return {}
    return ascend_environment(_ascend(config), environ)


def transport_timeout_s(config: Config, environ: Mapping[str, str]) -> float:
    """The longest that a write of this node would last, were it a producer's.

    Raises ValueError for a variable of the environment that is no number.
    """
    if config.transfer.protocol == "ascend":
        return ascend_timeout_s(_ascend(config), environ)
    text = environ.get("MC_TRANSFER_TIMEOUT") or "0"
    try:
        return max(TRANSFER_TIMEOUT_S, float(text))
    except ValueError:
        raise ValueError(
            f"environment variable MC_TRANSFER_TIMEOUT={text!r} is no number"
        ) from None


def write_timeout_s(config: Config, environ: Mapping[str, str]) -> float:
    """The longest that a producer's write lasts: as configured, or as the transport has it here.

    Raises ValueError like `transport_timeout_s`.
    """
    if config.transfer.timeout_s is not None:
        return config.transfer.timeout_s
    return transport_timeout_s(config, environ)


def _ascend(config: Config) -> AscendSettings:
    ascend = config.transfer.ascend
    return AscendSettings(
        transfer_timeout_ms=ascend.transfer_timeout_ms,
        connect_timeout_ms=ascend.connect_timeout_ms,
        base_port=ascend.base_port,
        rdma_timeout=ascend.rdma_timeout,
        rdma_retries=ascend.rdma_retries,
    )
