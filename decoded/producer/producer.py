"""One P rank: it hands out pushes and owns what they share."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from decoded.kv.layout import check_layout, layer_metadata
from decoded.wire.layout import KvLayout
from decoded.wire.side_channel import Failed, Metadata

from .errors import HandshakeError, ProducerError, PushError
from .handshake import HandshakeSettings, MetadataCache, fetch_metadata
from .notify import Notifier, NotifySettings
from .params import RemoteAddress, RemoteParams
from .plan import check_blocks, chunk_range, remote_rank, shard
from .progress import ProgressChannel
from .push import Push
from .rank import Rank, Target
from .request import PushRequest, check_local_blocks
from .sockets import Context
from .writer import Writers, WriterSettings


@dataclass(frozen=True)
class ProducerSettings:
    """`cached_engines`: D ranks whose metadata is kept. `max_writers`: push threads, each with
    a Mooncake engine; so many D ranks are written to at once. The times are the deployed ones.
    """

    handshake: HandshakeSettings = field(default_factory=HandshakeSettings)
    notify: NotifySettings = field(default_factory=NotifySettings)
    cached_engines: int = 16_000
    max_writers: int = 8
    close_timeout_s: float = 5.0


class Producer:
    """A P rank that pushes to D nodes, `decoded` ones and vllm-ascend engines alike.

    `layout` and `region_addrs` describe P's KV memory in this process; each region is
    registered with Mooncake. `host`: this node as peers reach it. `sender`: "host:port" that
    names this rank to D, distinct among all P ranks; by default its first Mooncake engine's.
    `on_thread_start`: runs in each push thread before Mooncake starts (Ascend: set the
    device). Raises LayoutError and TransferError.

    Any thread may call `open`. `close` it, or use it as a context manager.
    """

    def __init__(
        self,
        layout: KvLayout,
        region_addrs: Sequence[int],
        *,
        host: str,
        protocol: str = "tcp",
        device: str = "",
        sender: str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        settings: ProducerSettings | None = None,
        on_thread_start: Callable[[], None] | None = None,
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"there is no rank {tp_rank} in a tensor parallel size of {tp_size}")
        check_layout(layout)
        layers = layer_metadata(layout, region_addrs)
        sizes = [region.size for region in layout.regions]
        regions = list(zip(region_addrs, sizes, strict=True))
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self._settings = settings or ProducerSettings()
        writers = Writers(
            WriterSettings(host, protocol, device, regions, on_thread_start),
            self._settings.max_writers,
        )
        self._context: Context = zmq.Context()
        self._rank = Rank(
            layout=layout,
            layers=layers,
            sender=sender or f"{host}:{writers.port}",
            writers=writers,
            notifier=Notifier(self._context, self._settings.notify),
            progress=ProgressChannel(self._context),
            cache=MetadataCache(self._settings.cached_engines),
        )
        self._lock = threading.Lock()
        self._pushes: set[Push] = set()
        self._closed = False

    @property
    def sender(self) -> str:
        """How D knows this rank."""
        return self._rank.sender

    @property
    def pushes_open(self) -> int:
        """Pushes that have not ended."""
        return len(self._pushes)

    @property
    def progress_dropped(self) -> int:
        """Progress messages that D was too slow to take."""
        return self._rank.progress.dropped

    def open(self, request: PushRequest) -> Push:
        """Begin the push of a request. Blocks for a handshake, 3 s at most, where D's rank is
        not known yet.

        Raises ProducerError, and then D has been told FAILED if it can be told: PushError
        for what the caller did, PlanError where memory does not fit, HandshakeError.
        """
        params = request.params
        if self._closed:
            raise PushError("the producer is closed")
        if request.prompt_tokens < 1:
            raise PushError(f"{params.request_id}: a prompt has at least one token")
        try:
            ratio, at = self._served(params)
        except ProducerError:
            self.refuse(RemoteAddress.of(params))
            raise
        if not self._something(request, range(len(self._rank.layout.groups))):
            check_local_blocks(self._rank.layout, request.block_ids)
            return self._track(Push(self._rank, request, None))
        port = params.remote_port + at
        try:
            self._check(request)
            metadata, fresh = self._metadata(request, port)
            target = self._target(request, metadata, port, ratio)
        except ProducerError as error:
            # D said an error itself, or it expects no word.
            said = isinstance(error, HandshakeError) and error.answered
            if not said and self._something(request, [self._rank.layout.layers[-1].group]):
                self.refuse(RemoteAddress.of(params))
            raise
        push = self._track(Push(self._rank, request, target if target.shard.sends else None))
        if fresh and target.shard.parts > 1:
            push.connect()
        return push

    def knows(self, params: RemoteParams) -> bool:
        """Whether `open` needs no handshake for this request."""
        try:
            _, at = self._served(params)
        except ProducerError:
            return True  # It is refused at once.
        return self._rank.cache.get(params.remote_engine_id, params.remote_port + at) is not None

    def refuse(self, address: RemoteAddress) -> None:
        """Tell D that no KV comes for a request; returns at once. For one that cannot be opened.

        The D rank that this rank serves is told. Where the sizes do not fit nobody serves any;
        then P's ranks share out D's, so that each is told.
        """
        parts, rest = divmod(self.tp_size, address.remote_tp_size)
        # How many senders D hears from is not known yet; D takes the largest number that it is
        # told, and this is never too small.
        count, told = (
            (1, range(self.tp_rank, address.remote_tp_size, self.tp_size))
            if rest or not parts
            else (parts, [self.tp_rank // parts])
        )
        message = Failed(address.request_id, count, self._rank.sender)
        with self._lock:
            if self._closed:
                return
            for rank in told:
                if address.remote_port + rank <= 65535:
                    self._rank.notifier.send(
                        address.remote_host, address.remote_port + rank, message
                    )

    def close(self) -> None:
        """Fail every push that is under way, tell their D ranks, close Mooncake.

        Waits `close_timeout_s` for D to be told, and as long as it takes for a write that is
        under way, since that reads P's memory.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pushes = list(self._pushes)
        outcomes = [push.fail("the producer is closing") for push in pushes]
        concurrent.futures.wait(outcomes, self._settings.close_timeout_s)
        try:
            self._rank.writers.close()
        finally:
            self._rank.progress.close()
            self._rank.notifier.close()
            self._context.term()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _served(self, params: RemoteParams) -> tuple[int, int]:
        """(P ranks per D rank, the D rank that this rank serves)."""
        at = remote_rank(self.tp_rank, self.tp_size, params.remote_tp_size)
        if params.remote_port + at > 65535:
            raise PushError(f"D's rank {at} would have side channel port {params.remote_port + at}")
        return self.tp_size // params.remote_tp_size, at

    def _something(self, request: PushRequest, groups: Sequence[int]) -> bool:
        """Whether D lacks a block of one of these KV groups."""
        params, prompt = request.params, request.prompt_tokens
        sizes = [self._rank.layout.groups[group].block_size for group in groups]
        return any(params.remote_block_ids) and any(
            chunk_range(size, prompt, params.remote_cached_tokens, 0, prompt) for size in sizes
        )

    def _check(self, request: PushRequest) -> None:
        params, groups = request.params, len(self._rank.layout.groups)
        if params.remote_pcp_size * params.remote_dcp_size != 1:
            raise PushError(
                "context parallel D engines (remote_pcp_size, remote_dcp_size) cannot be served"
            )
        check_local_blocks(self._rank.layout, request.block_ids)
        if not groups == len(params.remote_block_ids) == len(params.remote_block_size):
            raise PushError(
                f"P has {groups} KV groups, D gave {len(params.remote_block_ids)} lists of blocks "
                f"and {len(params.remote_block_size)} block sizes"
            )

    def _metadata(self, request: PushRequest, port: int) -> tuple[Metadata, bool]:
        params = request.params
        found = self._rank.cache.get(params.remote_engine_id, port)
        if found is not None:
            return found, False
        request_id = request.request_id or params.request_id
        found = fetch_metadata(
            self._context, params.remote_host, port, request_id, self._settings.handshake
        )
        self._rank.cache.add(params.remote_engine_id, port, found)
        return found, True

    def _target(self, request: PushRequest, metadata: Metadata, port: int, ratio: int) -> Target:
        params, layout = request.params, self._rank.layout
        part = shard(self._rank.layers, metadata.layer_metadata, self.tp_rank, ratio)
        for layer in layout.layers:
            check_blocks(
                layer.name,
                self._rank.layers[layer.name],
                metadata.layer_metadata[layer.name],
                layout.groups[layer.group].block_size,
                params.remote_block_size[layer.group],
                len(params.remote_block_ids[layer.group]),
                request.prompt_tokens,
            )
        return Target(params.remote_engine_id, params.remote_host, port, metadata, part)

    def _track(self, push: Push) -> Push:
        """Keep a push until it has ended, so that `close` can end it."""
        with self._lock:
            if self._closed:
                raise PushError("the producer is closed")
            self._pushes.add(push)
        push.outcome.add_done_callback(lambda _: self._untrack(push))
        return push

    def _untrack(self, push: Push) -> None:
        with self._lock:
            self._pushes.discard(push)
