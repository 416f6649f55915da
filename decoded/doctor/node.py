"""What the daemon needs of its node, whatever holds the KV: looked at, and tried where that shows
more. Nothing is left behind, and a running daemon is not disturbed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from decoded.config import warnings

from . import clock, host, memory, ports, software
from .report import Findings

if TYPE_CHECKING:
    from decoded.config import Config


def examine(
    config: Config, environ: Mapping[str, str], running: Mapping[str, Any] | None
) -> Findings:
    """`running`: the status report of the daemon that runs with this configuration, if one does:
    what it holds is no problem.
    """
    findings = Findings()
    for warning in warnings(config, environ):
        findings.note("configuration", str(warning), "decoded check-config says the same")
    software.look_at_versions(findings)
    software.look_at_mooncake(findings, config)
    software.look_at_ascend(findings, config)
    memory.look_at_shared_memory(findings, config, running)
    memory.look_at_stale_memory(findings)
    ports.look_at_daemon(findings, running)
    ports.look_at_link(findings, config, environ, running)
    ports.look_at_side_channels(findings, config, running)
    host.look_at_descriptors(findings)
    host.look_at_locked_memory(findings, config)
    host.look_at_processors(findings)
    clock.look_at_clock(findings)
    return findings
