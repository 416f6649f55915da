"""The configuration tree: every key, its default and its bounds.

One frozen pydantic model per section; unknown keys are errors; each name ends in
its unit. Rules that join several keys are in `checks.py`.
"""

from __future__ import annotations

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
from .endpoint import check_endpoint

# The type of the one error that carries `checks.Problem`s in its context.
RULES_BROKEN = "rules_broken"

# Numbers are strict: YAML's `yes` is no number of seconds.
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False, strict=True)]
Delay = Annotated[float, Field(ge=0, le=86_400, allow_inf_nan=False, strict=True)]
Items = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
Host = Annotated[str, Field(min_length=1, max_length=253)]


class Section(BaseModel):
    """Base of every section: frozen, without unknown keys. The text below a key is for users,
    too: editors show it (`config.document`).
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )


class LinkConfig(Section):
    """The engine link: the socket that engines speak to."""

    endpoint: str | None = None
    """`ipc:///absolute/path` or `tcp://host:port`. Null: `decoded.sock` in the runtime folder."""
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
    """Address that producers are told. Null: `bind_host`, which is then no wildcard."""
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
    """How bytes travel; the prefill nodes' has to be the same."""
    device: Annotated[str, Field(max_length=256)] = ""
    """What Mooncake takes as its device name, for instance `mlx5_0`; empty: Mooncake chooses."""
    timeout_s: Seconds | None = None
    """The longest that a producer's write can last: its MC_TRANSFER_TIMEOUT (Ascend:
    ASCEND_TRANSFER_TIMEOUT). Blocks are held back at least this long after the last
    moment at which a write may have begun, so never set it lower than the producers' value.
    Null: as long as a write of this node would last (`config.bridge.write_timeout_s`).
    """
    ascend: AscendConfig = AscendConfig()
    """Only for `ascend`."""


class PoolGroup(Section):
    """One KV group of the pool: layers that share block ids."""

    block_size: Annotated[int, Field(ge=1, le=1_048_576, strict=True)]
    """Tokens per block."""
    num_blocks: Annotated[int, Field(ge=1, le=2**32, strict=True)]
    """Blocks per rank; block 0 is never an engine's to give away."""


class PoolTensor(Section):
    """One tensor of a layer: K, V, or a part of MLA."""

    block_len: Annotated[int, Field(ge=1, le=2**40, strict=True)]
    """Bytes of one kernel block."""
    block_size_scale: Annotated[int, Field(ge=1, le=65_536, strict=True)] = 1
    """Kernel blocks per block of the engine."""


class PoolLayer(Section):
    """`count` layers of the same shape."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    """As the prefill nodes name it; `{}` stands for the layer's number, counted from 0."""
    count: Annotated[int, Field(ge=1, le=1_024, strict=True)] = 1
    """This many layers of the same shape."""
    group: Annotated[int, Field(ge=0, le=255, strict=True)] = 0
    """Which of `groups`, counted from 0."""
    tensors: Annotated[tuple[PoolTensor, ...], Field(min_length=1, max_length=16)]
    """In the order in which prefill nodes have them."""


class PoolConfig(Section):
    """KV memory that the daemon allocates at start, the same for each of `ranks` ranks."""

    ranks: Annotated[int, Field(ge=1, le=4_096, strict=True)] = 1
    """Ranks per engine, each with memory of its own."""
    npus: tuple[Annotated[int, Field(ge=0, le=65_535, strict=True)], ...] = ()
    """The machine's number of each rank's NPU; empty: shared memory of the host."""
    groups: Annotated[tuple[PoolGroup, ...], Field(min_length=1, max_length=256)]
    """KV groups."""
    layers: Annotated[tuple[PoolLayer, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    """In the order of a forward pass."""

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
    """Null: the daemon owns no KV memory, engines bring their own."""


class TlsConfig(Section):
    """Certificates for https metaservers."""

    ca_file: Path | None = None
    """Authorities to trust. Null: the system's."""
    cert_file: Path | None = None
    """The daemon's own certificate, for metaservers that ask for one."""
    key_file: Path | None = None
    """The key of that certificate."""
    key_password: SecretStr | None = None
    """The key's password; better given in the environment."""


class MetaserverConfig(Section):
    """The POST to the proxy that starts a prefill; its answer comes when the prefill has ended."""

    connect_timeout_s: Seconds = 5.0
    """For the connection alone."""
    total_timeout_s: Seconds = 300.0
    """For the whole call, prefill included."""
    retries: Annotated[int, Field(ge=0, le=10, strict=True)] = 3
    """Further tries after a connection could not be made; nothing else is tried again."""
    backoff_s: Delay = 0.2
    """Wait before the first of them; doubles each time."""
    tls: TlsConfig | None = None
    """Null: the system's authorities, no certificate of our own."""


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
    """For how long they are."""


class FixedDelay(Section):
    """The same delay for each virtual request."""

    fixed_s: Delay
    """From submit to the end."""


class TransferDelay(Section):
    """What a producer of a given speed would take: latency plus bytes over bandwidth."""

    latency_s: Delay = 0.0
    """Until the first byte."""
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False, strict=True)]
    """Of all ranks together."""
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
    """Null: finished at once. For benchmarks: finished after this long."""


class LogConfig(Section):
    """Log lines, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """`auto`: `console` on a terminal, else `json`."""


class Config(Section):
    """The whole configuration. Every key has a default: an empty file is valid."""

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
