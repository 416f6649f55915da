"""Rules that join several keys, and what is allowed but likely to be a mistake."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .transport import transport_timeout_s, write_timeout_s

if TYPE_CHECKING:
    from .schema import Config

WILDCARDS = frozenset({"0.0.0.0", "::", "[::]", "*"})

# Mooncake takes its ports from here unless MC_MIN_RPC_PORT, MC_MAX_RPC_PORT say otherwise.
_MOONCAKE_PORTS = (15_000, 17_000)
# What a layout on the wire can hold.
MAX_LAYERS = 1_024


@dataclass(frozen=True)
class Problem:
    """`path`: the dotted key to change. `origin`: where its value came from, if known.

    `involved`: the other keys that the rule looked at.
    """

    path: str
    text: str
    origin: str = ""
    involved: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {self.text}{where}" if self.path else f"{self.text}{where}"


def broken_rules(config: Config) -> list[Problem]:
    """Every rule that a tree of valid values breaks; empty for a valid configuration."""
    return [*_link(config), *_side_channel(config), *_pool(config), *_tls(config)]


def warnings(config: Config, environ: Mapping[str, str]) -> list[Problem]:
    """What is allowed, but hardly meant."""
    return [*_warn_deadlines(config), *_warn_transfer(config, environ)]


def unreadable_files(config: Config) -> list[Problem]:
    """Files that the configuration names and the daemon could not read."""
    tls = config.metaserver.tls
    if tls is None:
        return []
    files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    return [
        Problem(f"metaserver.tls.{key}", f"{path} is not a file that this user can read")
        for key, path in files.items()
        if path is not None and not (path.is_file() and os.access(path, os.R_OK))
    ]


def _link(config: Config) -> Iterator[Problem]:
    link = config.link
    if link.heartbeat_s >= link.timeout_s:
        text = (
            f"{link.heartbeat_s:g} s is not below link.timeout_s ({link.timeout_s:g} s): "
            "every session would be given up between two heartbeats"
        )
        yield Problem("link.heartbeat_s", text, involved=("link.timeout_s",))


def _side_channel(config: Config) -> Iterator[Problem]:
    side = config.side_channel
    advertise = "side_channel.advertise_host"
    if side.advertise_host in WILDCARDS:
        text = f"producers cannot connect to '{side.advertise_host}': give this node's address"
        yield Problem(advertise, text)
    elif side.advertise_host is None and side.bind_host in WILDCARDS:
        text = (
            f"needed, because side_channel.bind_host is '{side.bind_host}', "
            "which tells producers no address to connect to"
        )
        yield Problem(advertise, text, involved=("side_channel.bind_host",))
    last = side.base_port + side.ranks - 1
    if side.base_port and last > 65_535:
        text = f"{side.ranks} ranks from {side.base_port} on end at port {last}, beyond 65535"
        yield Problem("side_channel.base_port", text, involved=("side_channel.ranks",))


def _pool(config: Config) -> Iterator[Problem]:
    pool = config.kv.pool
    if pool is None:
        return
    for index, layer in enumerate(pool.layers):
        path = f"kv.pool.layers.{index}"
        if layer.group >= len(pool.groups):
            text = f"there is no KV group {layer.group}; kv.pool.groups has {len(pool.groups)}"
            yield Problem(f"{path}.group", text, involved=("kv.pool.groups",))
        if layer.count > 1 and "{}" not in layer.name:
            text = (
                f"'{layer.name}' names {layer.count} layers alike: put {{}} where the number goes"
            )
            yield Problem(f"{path}.name", text, involved=(f"{path}.count",))
    if pool.npus and len(pool.npus) != pool.ranks:
        text = f"{len(pool.npus)} NPUs for {pool.ranks} ranks: name one for each, or none"
        yield Problem("kv.pool.npus", text, involved=("kv.pool.ranks",))
    if pool.npus and config.transfer.protocol != "ascend":
        text = f"transfer.protocol {config.transfer.protocol} does not reach an NPU's memory"
        yield Problem("kv.pool.npus", text, involved=("transfer.protocol",))
    total = sum(layer.count for layer in pool.layers)
    if total > MAX_LAYERS:
        yield Problem("kv.pool.layers", f"{total} layers in all, at most {MAX_LAYERS} are possible")
        return
    # Several layers of one entry without {} are reported above.
    alike = {layer.name for layer in pool.layers if layer.count > 1 and "{}" not in layer.name}
    for name, times in Counter(layer.name for layer in pool.expanded()).items():
        if times > 1 and name not in alike:
            yield Problem("kv.pool.layers", f"the layer name '{name}' is there {times} times")


def _tls(config: Config) -> Iterator[Problem]:
    tls = config.metaserver.tls
    if tls is None:
        return
    path = "metaserver.tls"
    if tls.key_file is not None and tls.cert_file is None:
        text = "needed, because metaserver.tls.key_file is set"
        yield Problem(f"{path}.cert_file", text, involved=(f"{path}.key_file",))
    if tls.cert_file is not None and tls.key_file is None:
        text = "needed, because metaserver.tls.cert_file is set"
        yield Problem(f"{path}.key_file", text, involved=(f"{path}.cert_file",))
    if tls.key_password is not None and tls.key_file is None and tls.cert_file is None:
        text = "means nothing without metaserver.tls.key_file"
        yield Problem(f"{path}.key_password", text, involved=(f"{path}.key_file",))


def _warn_deadlines(config: Config) -> Iterator[Problem]:
    total, request = config.metaserver.total_timeout_s, config.deadlines.request_s
    if total > request:
        text = (
            f"{total:g} s is longer than deadlines.request_s ({request:g} s): requests expire "
            "first, and their blocks then drain until the call's time-out too"
        )
        yield Problem("metaserver.total_timeout_s", text)
    if config.deadlines.registration_s > request:
        text = f"longer than deadlines.request_s ({request:g} s), which ends the wait first"
        yield Problem("deadlines.registration_s", text)


def _warn_transfer(config: Config, environ: Mapping[str, str]) -> Iterator[Problem]:
    try:
        lasts_s = transport_timeout_s(config, environ)
        drains_s = write_timeout_s(config, environ)
        low = int(environ.get("MC_MIN_RPC_PORT", _MOONCAKE_PORTS[0]))
        high = int(environ.get("MC_MAX_RPC_PORT", _MOONCAKE_PORTS[1]))
    except ValueError as error:
        yield Problem("", str(error))
        return
    if lasts_s > drains_s and _says_how_long(config, environ):
        text = (
            f"{drains_s:g} s is less than the {lasts_s:g} s that a write of this node would last "
            "by its settings: with the same at the producers, one can outlast the drain"
        )
        yield Problem("transfer.timeout_s", text)
    side = config.side_channel
    if side.base_port and side.base_port <= high and side.base_port + side.ranks > low:
        last = side.base_port + side.ranks - 1
        text = (
            f"ports {side.base_port} to {last} overlap with {low} to {high}, from which Mooncake "
            "takes its own at random: choose others, or move MC_MIN_RPC_PORT and MC_MAX_RPC_PORT"
        )
        yield Problem("side_channel.base_port", text)


def _says_how_long(config: Config, environ: Mapping[str, str]) -> bool:
    """Somebody has set how long writes last; a mere default of the transport warns of nothing."""
    if config.transfer.protocol != "ascend":
        return "MC_TRANSFER_TIMEOUT" in environ
    names = ("ASCEND_TRANSFER_TIMEOUT", "HCCL_RDMA_TIMEOUT", "HCCL_RDMA_RETRY_CNT")
    ascend = config.transfer.ascend
    given = (ascend.transfer_timeout_ms, ascend.rdma_timeout, ascend.rdma_retries)
    return any(each is not None for each in given) or any(name in environ for name in names)
