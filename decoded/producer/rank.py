"""What the pushes of a P rank share, and where each of them goes."""

from __future__ import annotations

from dataclasses import dataclass

from decoded.kv.transfer import session_name
from decoded.wire.layout import KvLayout
from decoded.wire.side_channel import LayerMetadata, Metadata

from .handshake import MetadataCache
from .notify import Notifier
from .plan import Shard
from .progress import ProgressChannel
from .writer import Writers


@dataclass(frozen=True)
class Target:
    """The D rank that a push goes to: its side channel, its memory, our part of its blocks."""

    engine_id: str
    host: str
    port: int
    metadata: Metadata
    shard: Shard

    @property
    def session(self) -> str:
        return session_name(self.host, self.metadata.te_rpc_port)


@dataclass(frozen=True)
class Rank:
    """What all pushes of one P rank share."""

    layout: KvLayout
    layers: dict[str, LayerMetadata]
    sender: str
    writers: Writers
    notifier: Notifier
    progress: ProgressChannel
    cache: MetadataCache
