"""Importing Mooncake: the right wheel, the protocol it can speak here, its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from .wheel import NPU_WHEEL, WheelError, check_wheel

Protocol = Literal["tcp", "rdma", "ascend"]
PROTOCOLS: tuple[Protocol, ...] = ("tcp", "rdma", "ascend")

_INFINIBAND = Path("/sys/class/infiniband")

_protocol: str | None = None


class TransferError(RuntimeError):
    """Mooncake could not do it; the text says what and, where it is known, why."""


def load_mooncake(protocol: str, device: str) -> Any:
    """Mooncake's module, imported late, with the environment it reads on import and at open.

    Call it with the lock held under which engines are opened. Raises TransferError.

    Mooncake takes the transport from what it finds on the machine, whatever protocol is
    named: "rdma" without an RDMA device is quietly TCP. So that is checked here.
    """
    global _protocol  # noqa: PLW0603 (Mooncake's own settings are one per process)
    if protocol not in PROTOCOLS:
        raise TransferError(f"unknown protocol {protocol!r}: it is one of {', '.join(PROTOCOLS)}")
    if _protocol not in (None, protocol):
        raise TransferError(
            f"this process runs Mooncake with protocol {_protocol} already; "
            f"{protocol} needs another process"
        )
    try:
        wheel = check_wheel()
    except WheelError as error:
        raise TransferError(str(error)) from None
    if (protocol == "ascend") != (wheel == NPU_WHEEL):
        raise TransferError(
            f"protocol {protocol} does not go with the installed {wheel}: ascend needs "
            f"{NPU_WHEEL}, tcp and rdma need one of the others"
        )
    if protocol == "rdma":
        _check_rdma(device)
    if protocol == "tcp":
        os.environ["MC_FORCE_TCP"] = "1"
    # Mooncake logs to standard error, by default a dozen lines per engine. Its own variable
    # outweighs glog's. "Local segment descriptor not found" stays: one line per engine.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        import mooncake.engine
    except ImportError as error:
        raise TransferError(
            f"{wheel} cannot be imported ({error}); is a system library missing?"
        ) from error
    _protocol = protocol
    return mooncake.engine


def _check_rdma(device: str) -> None:
    have = sorted(each.name for each in _INFINIBAND.glob("*"))
    if not have:
        raise TransferError(f"no RDMA device is in {_INFINIBAND}; use protocol tcp")
    missing = [each for each in device.split(",") if device and each not in have]
    if missing:
        raise TransferError(
            f"no RDMA device {', '.join(missing)}; this machine has {', '.join(have)}"
        )
