"""/dev/shm, and the configured pool."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import psutil

from decoded.kv.layout import pool_layout
from decoded.kv.regions import SHARED_PREFIX, SHM, stale_regions

from .report import Findings

if TYPE_CHECKING:
    from decoded.config import Config

_GIB = 1 << 30
# What containers get that are not told.
_CONTAINER_DEFAULT = 64 << 20


def look_at_shared_memory(
    findings: Findings, config: Config, running: Mapping[str, Any] | None
) -> None:
    """Its size, against that of a pool of host memory."""
    try:
        room = os.statvfs(SHM)
    except OSError as error:
        remedy = "mount a tmpfs there, which the engines see, too"
        findings.bad("shared memory", f"{SHM}: {error.strerror}", remedy)
        return
    if not os.access(SHM, os.W_OK | os.X_OK):
        findings.bad("shared memory", f"{SHM} cannot be written to", f"chmod 1777 {SHM}")
        return
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    found = f"{SHM} has {_size(free)} free of {_size(total)}"
    larger = f"mount -o remount,size=... {SHM}; in a container --shm-size, or mount the node's"
    pool = _pool_bytes(config)
    if pool is None:
        if total <= _CONTAINER_DEFAULT:
            findings.note("shared memory", found, f"engines' KV memory has to fit: {larger}")
        else:
            findings.ok("shared memory", found)
        return
    found += f"; kv.pool takes {_size(pool)}"
    available = psutil.virtual_memory().available
    if running is not None:
        findings.ok("shared memory", f"{found}, which the running daemon has")
    elif pool > free:
        findings.bad("shared memory", found, f"{larger}; or make kv.pool smaller")
    elif pool > available:
        found += f", and this machine has {_size(available)} of memory left"
        findings.bad("shared memory", found, "make kv.pool smaller")
    else:
        findings.ok("shared memory", found)


def look_at_stale_memory(findings: Findings, prefix: str = SHARED_PREFIX) -> None:
    """What dead processes have left."""
    if stale := stale_regions(prefix):
        findings.note(
            "left over",
            f"{len(stale)} pieces of shared memory of dead processes: {', '.join(stale[:4])}",
            "the daemon removes them at its next start or stop, and when an engine goes",
        )


def _pool_bytes(config: Config) -> int | None:
    """Of all ranks together; None where there is no pool, or it lies on NPUs."""
    pool = config.kv.pool
    if pool is None or pool.npus:
        return None
    layout = pool_layout(pool.groups, pool.expanded(), f"{SHARED_PREFIX}doctor")
    return pool.ranks * sum(region.size for region in layout.regions)


def _size(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"
