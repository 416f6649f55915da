"""What Mooncake's `ascend` protocol reads from the environment, and how long its writes last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_RDMA_TIMEOUT = 20
DEFAULT_RDMA_RETRIES = 7
TRIES = 2


@dataclass(frozen=True)
class AscendSettings:
    """None leaves the environment's value as it is.

    `transfer_timeout_ms`: ASCEND_TRANSFER_TIMEOUT. `connect_timeout_ms`:
    ASCEND_CONNECT_TIMEOUT. `base_port`: ASCEND_BASE_PORT, the first port that the transport's
    engines try. `rdma_timeout`, `rdma_retries`: HCCL_RDMA_TIMEOUT (the network card waits 4.096 us
    times 2 to this power for an acknowledgement) and HCCL_RDMA_RETRY_CNT.
    """

    transfer_timeout_ms: int | None = None
    connect_timeout_ms: int | None = None
    base_port: int | None = None
    rdma_timeout: int | None = None
    rdma_retries: int | None = None


def ascend_environment(settings: AscendSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before Mooncake is loaded.

    Without a time-out for transfers in `settings` or `environ` it is derived as vllm-ascend
    does it (`get_transfer_timeout_value`): what all retries of the network card take, and 3 s.
    Raises ValueError for a variable of `environ` that is no number.
    """
    given = {
        "HCCL_RDMA_TIMEOUT": settings.rdma_timeout,
        "HCCL_RDMA_RETRY_CNT": settings.rdma_retries,
        "ASCEND_CONNECT_TIMEOUT": settings.connect_timeout_ms,
        "ASCEND_BASE_PORT": settings.base_port,
        "ASCEND_TRANSFER_TIMEOUT": settings.transfer_timeout_ms,
    }
    variables = {name: str(value) for name, value in given.items() if value is not None}
    both = {**environ, **variables}
    if not both.get("ASCEND_TRANSFER_TIMEOUT"):
        exponent = _number(both, "HCCL_RDMA_TIMEOUT", DEFAULT_RDMA_TIMEOUT)
        retries = _number(both, "HCCL_RDMA_RETRY_CNT", DEFAULT_RDMA_RETRIES)
        variables["ASCEND_TRANSFER_TIMEOUT"] = str(
            int(4.096 * 2**exponent * retries // 1000 + 3000)
        )
    return variables


def ascend_timeout_s(settings: AscendSettings, environ: Mapping[str, str]) -> float:
    """The longest that one write lasts, in seconds. Raises ValueError like `ascend_environment`.

    Mooncake tries a transfer that has failed once more (seen with 0.3.13.post1), each time
    for as long as the time-out.
    """
    both = {**environ, **ascend_environment(settings, environ)}
    return TRIES * _number(both, "ASCEND_TRANSFER_TIMEOUT", 0) / 1000


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}={text!r} is no whole number") from None
