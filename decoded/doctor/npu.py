"""Ascend NPUs: drivers, wheels and devices, and every arrangement of KV memory for real."""

from __future__ import annotations

import os
import re
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from decoded.kv.ascend import AscendSettings, ascend_environment
from decoded.kv.wheel import NPU_WHEEL, WheelError, check_wheel

from .report import Findings, NpuFindings
from .trial import run_trial

_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_TOOLKITS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_TRIALS = "decoded.doctor.npu_trial"
_GIB = 1 << 30


def examine() -> NpuFindings:
    """Look, then try; nothing is left behind. Each trial is a process of its own."""
    findings = NpuFindings()
    look_for_driver(findings)
    look_for_toolkit(findings)
    if not _wheels(findings):
        return findings
    devices = _devices(findings)
    if not devices:
        return findings
    _environment(findings)
    trials: list[tuple[Any, ...]] = [
        (f"NPU {each}: Mooncake to itself", "own", each) for each in devices
    ]
    trials += [
        (f"NPU {sender} to NPU {receiver}: Mooncake", "between", sender, receiver)
        for sender, receiver in pairwise(devices)
    ]
    own = all([_trial(findings, *trial) for trial in trials])
    shared = all(
        [_trial(findings, f"NPU {each}: shared with a process", "shared", each) for each in devices]
    )
    _conclude(findings, devices, own, shared)
    return findings


def look_for_driver(findings: Findings) -> None:
    """The version of the NPUs' driver, or where it should be."""
    try:
        text = _DRIVER.read_text()
    except OSError:
        findings.note(
            "driver", f"{_DRIVER} cannot be read", "in a container, mount /usr/local/Ascend/driver"
        )
        return
    found = re.search(r"^Version=(.+)$", text, re.MULTILINE)
    findings.ok("driver", found.group(1).strip() if found else text.strip()[:80])


def look_for_toolkit(findings: Findings) -> None:
    """The version of CANN, or how to load it."""
    for variable in _TOOLKITS:
        if folder := os.environ.get(variable):
            versions = sorted(Path(folder).glob("*/ascend_toolkit_install.info"))
            found = (
                re.search(r"^version=(.+)$", versions[0].read_text(), re.M) if versions else None
            )
            findings.ok("CANN", f"{found.group(1)} in {folder}" if found else folder)
            return
    findings.note(
        "CANN", "not in the environment", "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    )


def _wheels(findings: Findings) -> bool:
    try:
        wheel = check_wheel()
    except WheelError as error:
        findings.bad("Mooncake", str(error), f"pip install {NPU_WHEEL}")
        return False
    if wheel != NPU_WHEEL:
        findings.bad("Mooncake", f"{wheel} speaks no ascend", f"uninstall it; install {NPU_WHEEL}")
        return False
    findings.ok("Mooncake", f"{wheel} {metadata.version(wheel)}")
    try:
        torch, torch_npu = metadata.version("torch"), metadata.version("torch-npu")
    except metadata.PackageNotFoundError as error:
        findings.bad("torch_npu", f"{error} is not installed", "see docs/ascend.md")
        return False
    if torch.split("+")[0].split(".")[:2] != torch_npu.split(".")[:2]:
        findings.bad(
            "torch_npu",
            f"{torch_npu} does not fit torch {torch}",
            f"install torch-npu {'.'.join(torch.split('+')[0].split('.')[:2])}.*",
        )
        return False
    findings.ok("torch_npu", f"{torch_npu}, with torch {torch}")
    return True


def _devices(findings: Findings) -> list[int]:
    """The machine's numbers of those that can be used."""
    said = run_trial(_TRIALS, "devices")
    if isinstance(said, str):
        findings.bad("NPUs", said, "load CANN's environment; is /dev/davinci* there and readable?")
        return []
    if not said:
        findings.bad(
            "NPUs",
            "none",
            "check npu-smi info and ASCEND_RT_VISIBLE_DEVICES; in a container: --device",
        )
    for each in said:
        free, total = each["free"] / _GIB, each["total"] / _GIB
        findings.ok(f"NPU {each['number']}", f"{each['name']}, {free:.1f} of {total:.1f} GiB free")
    return [each["number"] for each in said]


def _environment(findings: Findings) -> None:
    try:
        values = ascend_environment(AscendSettings(), os.environ)
    except ValueError as error:
        findings.bad("environment", str(error), "correct it, or unset it")
        return
    chosen = {**os.environ, **values}["ASCEND_TRANSFER_TIMEOUT"]
    findings.ok(
        "environment", f"a transfer is given up after {chosen} ms (ASCEND_TRANSFER_TIMEOUT)"
    )


def _trial(findings: Findings, what: str, *arguments: object) -> bool:
    said = run_trial(_TRIALS, *arguments)
    if isinstance(said, str):
        findings.bad(what, said, "see the plog in ~/ascend/log, and docs/ascend.md")
        return False
    findings.ok(what, f"{said['mib']} MiB, every byte compared, {said['seconds'] * 1000:.0f} ms")
    return True


def _conclude(findings: NpuFindings, devices: list[int], own: bool, shared: bool) -> None:
    if not own:
        return
    findings.works.append("transfer (the worker runs Mooncake)")
    findings.settings += [
        "daemon: transfer.protocol: ascend (configs/ascend.yaml)",
        'engine: "kv_connector_extra_config": {"memory": "transfer"}, which auto chooses on NPUs',
    ]
    if shared:
        findings.works += ["shared (the engine's caches, mapped by the daemon)", "pool"]
        findings.settings += [
            'or engine: "kv_connector_extra_config": {"memory": "shared"}',
            f"or daemon: kv.pool with npus: {devices}",
        ]
