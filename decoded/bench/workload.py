"""The requests that the control bench submits, and the daemons it submits them to."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from itertools import count
from typing import Any

from decoded.testing import DaemonProcess
from decoded.wire import link as wire

HOST = "127.0.0.1"
BLOCK_SIZE = 128
PROMPT_TOKENS = 1_024
_numbers = count()


def submissions(number: int, *, blocks: int = PROMPT_TOKENS // BLOCK_SIZE) -> list[wire.Submission]:
    """Virtual requests, all different, with ids as long as those of vLLM's server."""
    return [_submission(blocks, do_virtual=True) for _ in range(number)]


def real_submissions(number: int, metaserver: str) -> list[wire.Submission]:
    """Requests whose prefill `metaserver` is asked for."""
    params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": metaserver}
    blocks = PROMPT_TOKENS // BLOCK_SIZE
    return [_submission(blocks, kv_transfer_params=params) for _ in range(number)]


def _submission(blocks: int, **fields: Any) -> wire.Submission:
    number = next(_numbers)
    external_id = f"cmpl-{number:032x}-0"
    ids = list(range(1_000, 1_000 + blocks))
    return wire.Submission(
        f"{external_id}-{number % 2**32:08x}", external_id, [ids], blocks * BLOCK_SIZE, **fields
    )


def message_bytes() -> int:
    """The size of a submit message with one request."""
    return len(wire.encode(wire.Submit(submissions(1))))


def free_endpoint(transport: str, folder: str, name: str) -> str:
    """An endpoint that nobody uses."""
    if transport == "ipc":
        return f"ipc://{folder}/{name}"
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"tcp://{HOST}:{probe.getsockname()[1]}"


def daemon(endpoint: str, log_level: str, **sections: Mapping[str, Any]) -> DaemonProcess:
    """A daemon for a bench; `sections`: of its configuration."""
    tree: dict[str, Mapping[str, Any]] = {
        "link": {"endpoint": endpoint},
        "side_channel": {"bind_host": HOST},
        "log": {"level": log_level, "format": "json"},
        **sections,
    }
    return DaemonProcess(tree)
