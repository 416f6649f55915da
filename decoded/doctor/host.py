"""Limits and processors."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from .report import Findings

if TYPE_CHECKING:
    from decoded.config import Config

# Below this fewer than 4,096 metaserver calls can be open (daemon/daemon.py).
_FEW_DESCRIPTORS = 8_192
_FEW_PROCESSORS = 2
_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_CGROUPS = Path("/sys/fs/cgroup")


def look_at_descriptors(findings: Findings) -> None:
    """Of which each prefill in flight takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} (at most {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < _FEW_DESCRIPTORS:
        findings.note(
            "open files",
            f"{found}: about {soft // 2:,} prefills can be in flight at a time, others wait",
            "ulimit -n 65536, or LimitNOFILE=65536 in its service",
        )
    else:
        findings.ok("open files", found)


def look_at_locked_memory(findings: Findings, config: Config) -> None:
    """RDMA pins the KV memory; nothing else does."""
    if config.transfer.protocol != "rdma":
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        findings.ok("locked memory", "unlimited")
        return
    findings.bad(
        "locked memory",
        f"{soft / 2**20:,.0f} MiB: the network card cannot register more KV memory than that",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in its service",
    )


def look_at_processors(findings: Findings) -> None:
    """How many it may use, and who shares them."""
    usable = len(os.sched_getaffinity(0))
    share = _quota()
    found = f"{usable} of {os.cpu_count()}"
    if share is not None:
        found += f", of these {share:g} by the cgroup's quota"
    remedy = "give the daemon a core of its own, or its service a higher CPUWeight"
    if share is not None and share < 1:
        findings.note("processors", f"{found}: it is stopped when that is used up", remedy)
    elif usable <= _FEW_PROCESSORS and _autogroup():
        text = f"{found}; sched_autogroup shares them out between sessions: engines that spin"
        findings.note("processors", f"{text} can hold the daemon up for seconds", remedy)
    else:
        findings.ok("processors", found)


def _quota() -> float | None:
    """Processors that this process' cgroup (version 2) may use; None without a limit."""
    own = next(
        (
            line[3:]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line[:3] == "0::"
        ),
        None,
    )
    if own is None:
        return None
    folder = _CGROUPS / own.strip("/")
    shares = []
    while folder.is_relative_to(_CGROUPS):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except OSError:  # the root has none; without version 2 nobody has
            quota = period = "max"
        if quota != "max":
            shares.append(int(quota) / int(period))
        folder = folder.parent
    return min(shares, default=None)


def _autogroup() -> bool:
    try:
        return _AUTOGROUP.read_text().strip() == "1"
    except OSError:
        return False


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
