"""The configuration tree: every key, its default and its bounds.

One frozen pydantic model per section; unknown keys are errors; each name ends in
its unit. Rules that join several keys are in `checks.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .checks import MAX_LAYERS, broken_rules

# The type of the one error that carries `checks.Problem`s in its context.
RULES_BROKEN = "rules_broken"

# Linux's sockaddr_un.sun_path holds 108 bytes, the last of which is NUL.
MAX_IPC_PATH_BYTES = 107

# Numbers are strict: YAML's `yes` is no number of seconds.
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False, strict=True)]
Delay = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False, strict=True)]
Items = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
Host = Annotated[str, Field(min_length=1, max_length=253)]


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class LinkConfig(Section):
    """The engine link: the socket that engines speak to."""

    endpoint: str | None = None
    """`ipc:///absolute/path` or `tcp://host:port`. None: `decoded.sock` in the runtime folder."""
    heartbeat_s: Seconds = 1.0
    """How often each side tells that it lives."""
    timeout_s: Seconds = 10.0
    """Silence after which a session is given up."""
    max_sessions: Annotated[int, Field(ge=1, le=65_536, strict=True)] = 1024
    """Sessions at the same time: one per scheduler and one per worker rank."""

    @field_validator("endpoint")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        return value if value is None else check_endpoint(value)


class SideChannelConfig(Section):
    """Where producers reach the ranks of this node's engines."""

    bind_host: Host = "127.0.0.1"
    """Address that the side channels listen on. Mooncake engines listen on all addresses, with TCP
    unless MC_TCP_BIND_ADDRESS says otherwise.
    """
    advertise_host: Host | None = None
    """Address that producers are told. None: `bind_host`, which is then no wildcard."""
    base_port: Annotated[int, Field(ge=0, le=65_535, strict=True)] = 0
    """Port of world rank 0; rank n listens on `base_port + n`. 0: free ports, chosen per engine."""
    ranks: Annotated[int, Field(ge=1, le=4_096, strict=True)] = 1
    """Ports held from `base_port` on; means nothing while that is 0."""

    @property
    def host(self) -> str:
        """The address that producers are told."""
        return self.advertise_host or self.bind_host


class AscendConfig(Section):
    """What Mooncake's `ascend` takes from the environment; null leaves that as it is."""

    transfer_timeout_ms: Annotated[int, Field(ge=1, le=86_400_000, strict=True)] | None = None
    """ASCEND_TRANSFER_TIMEOUT. Null, and not in the environment: derived from the next two."""
    rdma_timeout: Annotated[int, Field(ge=5, le=24, strict=True)] | None = None
    """HCCL_RDMA_TIMEOUT: the network card waits 4.096 us * 2 to this power; 20 by default."""
    rdma_retries: Annotated[int, Field(ge=1, le=7, strict=True)] | None = None
    """HCCL_RDMA_RETRY_CNT; 7 by default."""
    connect_timeout_ms: Annotated[int, Field(ge=1, le=86_400_000, strict=True)] | None = None
    """ASCEND_CONNECT_TIMEOUT."""
    base_port: Annotated[int, Field(ge=1, le=65_535, strict=True)] | None = None
    """ASCEND_BASE_PORT: the first port that the transport tries."""


class TransferConfig(Section):
    """The Mooncake engine of each rank."""

    protocol: Literal["tcp", "rdma", "ascend"] = "tcp"
    device: Annotated[str, Field(max_length=256)] = ""
    """What Mooncake takes as its device name, for instance `mlx5_0`; empty: Mooncake chooses."""
    timeout_s: Seconds | None = None
    """The longest that a producer's write can last: its MC_TRANSFER_TIMEOUT (Ascend:
    ASCEND_TRANSFER_TIMEOUT). Blocks are held back at least this long after the last
    moment at which a write may have begun, so never set it lower than the producers' value.
    Null: as long as a write of this node would last (`config.bridge.write_timeout_s`).
    """
    ascend: AscendConfig = AscendConfig()


class PoolGroup(Section):
    """One KV group of the pool. `block_size`: tokens per block."""

    block_size: Annotated[int, Field(ge=1, le=1_048_576, strict=True)]
    num_blocks: Annotated[int, Field(ge=1, le=2**32, strict=True)]


class PoolTensor(Section):
    """One tensor of a layer. `block_len`: bytes of one kernel block.

    `block_size_scale`: kernel blocks per block of the engine.
    """

    block_len: Annotated[int, Field(ge=1, le=2**40, strict=True)]
    block_size_scale: Annotated[int, Field(ge=1, le=65_536, strict=True)] = 1


class PoolLayer(Section):
    """`count` layers of the same shape. In `name`, `{}` stands for the layer's number."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    count: Annotated[int, Field(ge=1, le=1_024, strict=True)] = 1
    group: Annotated[int, Field(ge=0, le=255, strict=True)] = 0
    tensors: Annotated[tuple[PoolTensor, ...], Field(min_length=1, max_length=16)]


class PoolConfig(Section):
    """KV memory that the daemon allocates at start, the same for each of `ranks` ranks."""

    ranks: Annotated[int, Field(ge=1, le=4_096, strict=True)] = 1
    npus: tuple[Annotated[int, Field(ge=0, le=65_535, strict=True)], ...] = ()
    """The machine's number of each rank's NPU; empty: shared memory of the host."""
    groups: Annotated[tuple[PoolGroup, ...], Field(min_length=1, max_length=256)]
    layers: Annotated[tuple[PoolLayer, ...], Field(min_length=1, max_length=MAX_LAYERS)]

    def expanded(self) -> tuple[PoolLayer, ...]:
        """One entry per layer (`count` 1), in order; `{}` replaced by its number from 0 on."""
        layers: list[PoolLayer] = []
        for entry in self.layers:
            for _ in range(entry.count):
                name = entry.name.replace("{}", str(len(layers)))
                layers.append(entry.model_copy(update={"name": name, "count": 1}))
        return tuple(layers)


class KvConfig(Section):
    """KV memory."""

    pool: PoolConfig | None = None
    """None: the daemon owns no KV memory, engines bring their own."""


class TlsConfig(Section):
    """Certificates for https metaservers."""

    ca_file: Path | None = None
    """Authorities to trust. None: the system's."""
    cert_file: Path | None = None
    key_file: Path | None = None
    """The daemon's own certificate and key, for metaservers that ask for one."""
    key_password: SecretStr | None = None


class MetaserverConfig(Section):
    """The POST to the proxy that starts a prefill; its answer comes when the prefill has ended."""

    connect_timeout_s: Seconds = 5.0
    total_timeout_s: Seconds = 300.0
    retries: Annotated[int, Field(ge=0, le=10, strict=True)] = 3
    """Further tries after a connection could not be made; nothing else is tried again."""
    backoff_s: Delay = 0.2
    """Wait before the first of them; doubles each time."""
    tls: TlsConfig | None = None


class DeadlinesConfig(Section):
    """What ends a wait."""

    request_s: Seconds = 300.0
    """From submit to the end of a request. A submit may ask for less."""
    registration_s: Seconds = 30.0
    """How long a request waits for its engine's KV registration."""
    done_s: Seconds = 30.0
    """How long the DONE messages may take after the metaserver's answer."""
    drain_margin_s: Delay = 1.0
    """Added to `transfer.timeout_s`: the length of a drain."""
    shutdown_s: Delay = 30.0
    """How long requests in flight may still finish after SIGTERM, before they are ended."""


class LimitsConfig(Section):
    """Bounds on memory."""

    max_requests: Items = 200_000
    """Requests in flight."""
    max_unacknowledged: Items = 200_000
    """Outcomes per engine that it has not acknowledged yet."""
    max_tombstones: Items = 10_000
    """Ended requests that are remembered, so that repeats are known as such."""
    tombstone_age_s: Seconds = 600.0


class FixedDelay(Section):
    """The same delay for each virtual request."""

    fixed_s: Delay


class TransferDelay(Section):
    """What a producer of a given speed would take: latency plus bytes over bandwidth."""

    latency_s: Delay = 0.0
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False, strict=True)]
    bytes_per_token: Annotated[int, Field(ge=0, le=10**12, strict=True)]
    """KV bytes of one token, all layers and ranks together."""


def _delay_kind(value: Any) -> str:
    fixed = "fixed_s" in value if isinstance(value, dict) else isinstance(value, FixedDelay)
    return FIXED_TAG if fixed else TRANSFER_TAG


# pydantic puts the tags into the paths of errors; no key looks like them.
FIXED_TAG = "<fixed>"
TRANSFER_TAG = "<transfer>"


class VirtualConfig(Section):
    """Virtual requests, which finish without any transfer."""

    delay: (
        Annotated[
            Annotated[FixedDelay, Tag(FIXED_TAG)] | Annotated[TransferDelay, Tag(TRANSFER_TAG)],
            Discriminator(_delay_kind),
        ]
        | None
    ) = None
    """None: finished at once. For benchmarks: finished after this long."""


class LogConfig(Section):
    """Log lines, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: `console` on a terminal, else `json`."""


class Config(Section):
    """The whole configuration. `Config()` is valid and is what an empty file means."""

    link: LinkConfig = LinkConfig()
    side_channel: SideChannelConfig = SideChannelConfig()
    transfer: TransferConfig = TransferConfig()
    kv: KvConfig = KvConfig()
    metaserver: MetaserverConfig = MetaserverConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    limits: LimitsConfig = LimitsConfig()
    virtual: VirtualConfig = VirtualConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _rules(self) -> Config:
        problems = broken_rules(self)
        if problems:
            text = "; ".join(str(problem) for problem in problems)
            raise PydanticCustomError(RULES_BROKEN, "{text}", {"text": text, "problems": problems})
        return self


def check_endpoint(endpoint: str) -> str:
    """`endpoint` unchanged, if ZMQ can use it. Raises ValueError that says what is wrong."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise ValueError(f"'{endpoint}' is neither ipc:///absolute/path nor tcp://host:port")
    if scheme == "ipc":
        length = len(os.fsencode(rest))
        if not rest.startswith("/") or rest.endswith("/"):
            raise ValueError(f"'{endpoint}': ipc:// needs the absolute path of a socket file")
        if length > MAX_IPC_PATH_BYTES:
            raise ValueError(
                f"the socket's path is {length} bytes long, Linux takes {MAX_IPC_PATH_BYTES}: "
                f"choose a shorter one than {rest}"
            )
        return endpoint
    host, separator, port = rest.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else None
    # `*` lets the system choose a port; the daemon then logs which.
    if not separator or not host or (port != "*" and (number is None or number > 65_535)):
        raise ValueError(f"'{endpoint}': tcp:// needs host:port, the port 1 to 65535 or *")
    return endpoint
