"""Versions, the Mooncake wheel, and whether it works with the configured protocol."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from decoded import __version__
from decoded.kv.wheel import EXTRAS, NPU_WHEEL, WheelError, check_wheel
from decoded.wire.link import PROTOCOL_VERSION

from .npu import look_for_driver, look_for_toolkit
from .report import Findings
from .trial import run_trial

if TYPE_CHECKING:
    from decoded.config import Config

_LIBRARIES = ("aiohttp", "msgspec", "pydantic", "structlog", "uvloop")
_OPTIONAL = ("torch", "torch-npu", "vllm", "vllm-ascend")
_DEVICES = Path("/dev")


def look_at_versions(findings: Findings) -> None:
    """This package, Python, and the libraries that it runs on."""
    findings.ok("decoded", f"{__version__}, protocol {PROTOCOL_VERSION}")
    findings.ok(
        "Python", f"{platform.python_version()} on {platform.system()} {os.uname().release}"
    )
    found = [f"pyzmq {zmq.pyzmq_version()} with libzmq {zmq.zmq_version()}"]
    found += [f"{name} {metadata.version(name)}" for name in _LIBRARIES]
    for name in _OPTIONAL:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    findings.ok("libraries", ", ".join(found))


def look_at_mooncake(findings: Findings, config: Config) -> None:
    """Exactly one wheel, which speaks the configured protocol; then a real transfer with it."""
    protocol = config.transfer.protocol
    try:
        wheel = check_wheel()
    except WheelError as error:
        findings.bad("Mooncake", str(error), "docs/operations.md#what-it-needs")
        return
    if (protocol == "ascend") != (wheel == NPU_WHEEL):
        fits = [name for name in EXTRAS if (name == NPU_WHEEL) == (protocol == "ascend")]
        findings.bad(
            "Mooncake",
            f"{wheel} does not speak transfer.protocol {protocol}",
            f"uninstall it and install {' or '.join(fits)}, or change the key",
        )
        return
    findings.ok("Mooncake", f"{wheel} {metadata.version(wheel)}")
    if protocol == "ascend":
        findings.note("transfer", "not tried: that takes an NPU", "decoded doctor --npu tries them")
        return
    host = config.side_channel.host
    said = run_trial("decoded.doctor.mooncake_trial", host, protocol, config.transfer.device)
    what = f"transfer over {protocol}"
    if isinstance(said, str):
        findings.bad(
            what,
            said,
            f"can this node reach itself at {host} (side_channel.advertise_host), on Mooncake's "
            "ports 15000 to 17000?",
        )
        return
    took_ms = said["seconds"] * 1000
    findings.ok(what, f"{said['mib']} MiB within {host}, every byte compared, {took_ms:.0f} ms")


def look_at_ascend(findings: Findings, config: Config) -> None:
    """Driver and CANN, where there is an NPU or should be one."""
    if config.transfer.protocol == "ascend" or any(_DEVICES.glob("davinci[0-9]*")):
        look_for_driver(findings)
        look_for_toolkit(findings)
