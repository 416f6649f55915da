"""`decoded bench data`: bandwidth of pushes through the daemon's path, and of Mooncake alone.

Both write the same blocks of the same regions to the same registered memory, layer by
layer, in turns. The daemon's path is everything from the metaserver's call to the
outcome: handshake (kept after the first), layer progress, DONE and the report.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import zmq
from rich.table import Table

from decoded.client import Client
from decoded.client.memory import SharedCaches, plan_layout
from decoded.config.schema import PoolGroup, PoolLayer, PoolTensor
from decoded.kv.layout import block_offset
from decoded.kv.regions import SharedRegion
from decoded.kv.transfer import TransferEngine, session_name
from decoded.observe import log
from decoded.producer import Producer, PushRequest, RemoteParams
from decoded.producer.handshake import HandshakeSettings, fetch_metadata
from decoded.wire import link as wire

from . import report
from .proxy import InstantProxy
from .stats import Ratio, rate_ratio, take_turns
from .workload import BLOCK_SIZE, HOST, daemon, free_endpoint

BLOCK_KIB = (16, 128, 1_024)
_TENSORS = 2
# An engine is as fast as its threads happen to be placed, for as long as it lives: one engine
# would compare its luck with another's.
ENGINES = 4
_TIMEOUT_S = 60


class Bandwidth(msgspec.Struct, frozen=True):
    """Medians of the turns, in bytes per second. `pieces`: per batch write, one batch a layer."""

    block_bytes: int
    pieces: int
    bytes_per_push: int
    path_bytes_per_s: float
    mooncake_bytes_per_s: float
    ratio: Ratio


class Document(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    machine: report.Machine
    order: str
    layers: int
    bandwidths: list[Bandwidth]
    verdicts: list[report.Verdict]


@dataclass(frozen=True)
class Plan:
    """One block size: `ids` are the blocks of both sides, in the order in which they are sent."""

    block_bytes: int
    layers: int
    ids: list[int]

    @property
    def pieces(self) -> int:
        return _TENSORS * len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.layers * self.pieces * self.block_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and with `--check` exit 1 for a missed target."""
    args = _parser().parse_args(argv)
    log.configure("warning")
    machine = report.machine()
    bandwidths = [
        _measure(_plan(kib, args.layers, args.layer_mib, args.contiguous), args.rounds)
        for kib in BLOCK_KIB
    ]
    targets = [
        report.Target(
            f"path / Mooncake alone at {each.block_bytes // 1024} KiB",
            each.ratio.value,
            "at least",
            0.95,
        )
        for each in bandwidths
        if each.block_bytes >= 128 * 1024
    ]
    order = "contiguous" if args.contiguous else "scattered"
    document = Document(machine, order, args.layers, bandwidths, report.judge(targets))
    report.emit(document, _tables(document), _notes(document), args.json)
    return report.exit_code(document.verdicts, args.check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="decoded bench data",
        description="Bandwidth of pushes through the daemon's path, in turns with Mooncake alone.",
    )
    parser.add_argument("--rounds", type=int, default=12, help="turns of each")
    # With 16 MiB each: the KV of about 4,096 tokens of an 8B model (GQA, bfloat16).
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--layer-mib", type=int, default=16, help="MiB per layer")
    parser.add_argument(
        "--contiguous",
        action="store_true",
        help="blocks in a row, which the producer merges into one piece per tensor; "
        "by default they are scattered and every block is a piece of its own on both sides",
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument("--json", action="store_true")
    return parser


def _plan(kib: int, layers: int, layer_mib: int, contiguous: bool) -> Plan:
    count = max(layer_mib * 1024 // kib // _TENSORS, 1)
    if contiguous:
        return Plan(kib * 1024, layers, list(range(1, count + 1)))
    # Every second block, shuffled: no two neighbours in memory come one after the other.
    ids = list(range(1, 2 * count, 2))
    random.Random(kib).shuffle(ids)
    return Plan(kib * 1024, layers, ids)


def _caches(plan: Plan) -> SharedCaches:
    tensors = tuple(PoolTensor(block_len=plan.block_bytes) for _ in range(_TENSORS))
    layers = [
        PoolLayer(name=f"model.layers.{index}.self_attn.attn", tensors=tensors)
        for index in range(plan.layers)
    ]
    group = PoolGroup(block_size=BLOCK_SIZE, num_blocks=max(plan.ids) + 1)
    return SharedCaches.create(plan_layout([group], layers))


def _measure(plan: Plan, rounds: int) -> Bandwidth:
    with tempfile.TemporaryDirectory(prefix="decoded-bench-") as folder:
        endpoint = free_endpoint("ipc", folder, "link.sock")
        with (
            daemon(endpoint, "warning"),
            InstantProxy() as proxy,
            _caches(plan) as source,
            _caches(plan) as target,
            Client(endpoint, "bench", "worker", subscribe=False) as worker,
            Client(endpoint, "bench") as scheduler,
        ):
            worker.register_kv(target.memory)
            _fill(source)
            addrs = [region.address for region in source.regions]
            ours: list[float] = []
            bare: list[float] = []
            for fresh in range(ENGINES):
                with Producer(source.layout, addrs, host=HOST) as producer:
                    path = _Path(plan, scheduler, proxy, producer, f"bench-{fresh}")
                    path.push()
                    if not fresh:
                        _compare(plan, source, target)
                    with _Alone(plan, source, path.params) as alone:
                        alone.push()
                        both = take_turns(-(-rounds // ENGINES), path.push, alone.push)
                ours += both[0]
                bare += both[1]
    return Bandwidth(
        plan.block_bytes,
        plan.pieces,
        plan.nbytes,
        median(ours),
        median(bare),
        rate_ratio(ours, bare),
    )


class _Path:
    """A request from submit to outcome, its layers pushed by the reference producer."""

    def __init__(
        self,
        plan: Plan,
        scheduler: Client,
        proxy: InstantProxy,
        producer: Producer,
        name: str,
    ) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._proxy = proxy
        self._producer = producer
        self._name, self._number = name, 0
        self.params: RemoteParams | None = None

    def push(self) -> float:
        """Bytes per second from the moment P knows the request to D's outcome."""
        plan, self._number = self._plan, self._number + 1
        tokens = len(plan.ids) * BLOCK_SIZE
        name = f"{self._name}-{self._number}"
        params = {"do_remote_prefill": True, "metaserver": self._proxy.url}
        self._scheduler.submit(
            wire.Submission(name, name, [plan.ids], tokens, kv_transfer_params=params)
        )
        self.params = self._proxy.take()
        began = time.perf_counter()
        push = self._producer.open(PushRequest(self.params, tokens, [plan.ids]))
        for layer in range(plan.layers):
            push.layer(layer)
        push.seal()
        ended = self._scheduler.wait(_TIMEOUT_S)
        took = time.perf_counter() - began
        if len(ended) != 1 or ended[0].state != "done":
            raise RuntimeError(f"the request did not end as done: {ended}")
        return plan.nbytes / took


class _Alone:
    """Mooncake and nothing else: one batch write per layer, the same pieces in the same order."""

    def __init__(self, plan: Plan, source: SharedCaches, params: RemoteParams | None) -> None:
        if params is None:
            raise ValueError("the daemon's memory is known once a request was pushed")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context:
            metadata = fetch_metadata(
                context, params.remote_host, params.remote_port, "bench", HandshakeSettings()
            )
        self._session = session_name(params.remote_host, metadata.te_rpc_port)
        self._batches: list[tuple[list[int], list[int], list[int]]] = []
        for layer in source.layout.layers:
            there = metadata.layer_metadata[layer.name]
            src: list[int] = []
            dst: list[int] = []
            for number, tensor in enumerate(layer.tensors):
                base = source.regions[tensor.region].address
                src += [base + block_offset(tensor, block) for block in plan.ids]
                far, length = there.kv_caches_base_addr[number], there.block_len[number]
                dst += [far + block * length for block in plan.ids]
            self._batches.append((src, dst, [plan.block_bytes] * len(src)))
        self._nbytes = plan.nbytes
        self._engine = TransferEngine.open(HOST)
        for region in source.regions:
            self._engine.register(region.address, region.size)

    def push(self) -> float:
        """Bytes per second of all layers."""
        began = time.perf_counter()
        for src, dst, lengths in self._batches:
            self._engine.write(self._session, src, dst, lengths)
        return self._nbytes / (time.perf_counter() - began)

    def __enter__(self) -> _Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def _fill(caches: SharedCaches) -> None:
    step = 2**24
    for region in caches.regions:
        assert isinstance(region, SharedRegion), "the bench has the host's memory"
        for at in range(0, region.size, step):
            count = min(step, region.size - at)
            region.buffer[at : at + count] = os.urandom(count)


def _compare(plan: Plan, source: SharedCaches, target: SharedCaches) -> None:
    """Raise RuntimeError unless every block that was pushed has arrived."""
    for layer in source.layout.layers:
        for number in range(_TENSORS):
            for block in plan.ids:
                sent = source.block(layer.name, number, block)
                if sent != target.block(layer.name, number, block):
                    raise RuntimeError(f"block {block} of {layer.name} has not arrived as sent")


def _tables(document: Document) -> list[Table]:
    title = f"pushes of {document.layers} layers, blocks {document.order}"
    made = report.table(
        title, "block", "pieces a layer", "MiB", "path GB/s", "Mooncake GB/s", "ratio", "by round"
    )
    for each in document.bandwidths:
        made.add_row(
            f"{each.block_bytes // 1024:,} KiB",
            f"{each.pieces:,}",
            f"{each.bytes_per_push / 2**20:,.0f}",
            f"{each.path_bytes_per_s / 1e9:.2f}",
            f"{each.mooncake_bytes_per_s / 1e9:.2f}",
            f"{each.ratio.value:.2f}",
            report.spread(each.ratio.rounds),
        )
    return [made, report.verdict_table(document.verdicts)]


def _notes(document: Document) -> list[str]:
    pooled = os.environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "unset")
    return [
        report.about(document.machine),
        f"Mooncake over loopback TCP, MC_TCP_ENABLE_CONNECTION_POOL {pooled}",
    ]
