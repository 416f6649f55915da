"""Which bytes of a layer go where: pure arithmetic over block ids and layer metadata.

A block of P is `block_size_scale` kernel blocks, and so is a block of D, with a scale of
its own. Both sides' kernel blocks hold the same tokens, so the k-th kernel block of a
request on P goes to the k-th on D, whatever the block sizes are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from decoded.wire.side_channel import LayerMetadata

from .errors import PlanError


class Run(NamedTuple):
    """`blocks` kernel blocks, contiguous on both sides, from `local` to `remote`."""

    local: int
    remote: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of each block of a D rank a P rank holds.

    `parts`: P ranks that share one D block, which is also the trans_count of the request
    at that D rank. `part`: this rank's place among them. `sends`: False where another P
    rank holds the same bytes (replicated KV heads, MLA) and sends them.
    """

    parts: int = 1
    part: int = 0
    sends: bool = True


@dataclass(slots=True)
class Writes:
    """Arguments of one batch write: as many sources as destinations and lengths, in bytes."""

    sources: list[int] = field(default_factory=list)
    destinations: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(self.lengths)


def remote_rank(tp_rank: int, tp_size: int, remote_tp_size: int) -> int:
    """The D rank that P rank `tp_rank` serves. Raises PlanError unless P's tensor parallel
    size is a multiple of D's, as the deployed wire requires.
    """
    if tp_size % remote_tp_size:
        raise PlanError(
            f"P's tensor parallel size {tp_size} is not a multiple of D's {remote_tp_size}"
        )
    return tp_rank // (tp_size // remote_tp_size)


def shard(
    local: Mapping[str, LayerMetadata],
    remote: Mapping[str, LayerMetadata],
    tp_rank: int,
    ratio: int,
) -> Shard:
    """This rank's part of D's blocks, read off both sides' block lengths.

    `ratio`: P ranks per D rank. A D block of `n` times P's length is shared by `n` P
    ranks; where `n` is less than the ratio, `ratio / n` ranks hold the same part and the
    first of them sends it. Layers that only D has stay as they are. Raises PlanError.
    """
    parts: int | None = None
    for name, ours in local.items():
        theirs = remote.get(name)
        if theirs is None:
            raise PlanError(f"D has no layer {name!r}")
        if ours.tensor_group_idx != theirs.tensor_group_idx:
            raise PlanError(
                f"layer {name!r}: KV groups per tensor are {ours.tensor_group_idx} on P, "
                f"{theirs.tensor_group_idx} on D"
            )
        for ours_len, theirs_len in zip(ours.block_len, theirs.block_len, strict=True):
            times, rest = divmod(theirs_len, ours_len)
            if rest or times == 0 or ratio % times:
                raise PlanError(
                    f"layer {name!r}: block_len is {ours_len} on P, {theirs_len} on D, with "
                    f"{ratio} P ranks per D rank (equal tensor parallel size needs equal lengths)"
                )
            if times != (times if parts is None else parts):
                raise PlanError(
                    f"layer {name!r}: a D block has {times} parts here, {parts} in layers before"
                )
            parts = times
    if parts is None:
        raise PlanError("P has no layers")
    replicas = ratio // parts
    return Shard(parts, tp_rank // replicas % parts, tp_rank % replicas == 0)


def check_blocks(
    layer: str,
    local: LayerMetadata,
    remote: LayerMetadata,
    block_size: int,
    remote_block_size: int,
    remote_blocks: int,
    prompt_tokens: int,
) -> None:
    """Raise PlanError unless both sides' kernel blocks of a layer hold the same tokens and
    D's blocks hold the whole prompt.
    """
    for ours, theirs in zip(local.block_size_scale, remote.block_size_scale, strict=True):
        if block_size * theirs != remote_block_size * ours:
            raise PlanError(
                f"layer {layer!r}: a kernel block holds {block_size}/{ours} tokens on P, "
                f"{remote_block_size}/{theirs} on D"
            )
    if remote_blocks * remote_block_size < prompt_tokens:
        raise PlanError(
            f"layer {layer!r}: D gave {remote_blocks} blocks of {remote_block_size} tokens, "
            f"too few for a prompt of {prompt_tokens}"
        )


def chunk_range(
    block_size: int, prompt_tokens: int, cached_tokens: int, sent_tokens: int, computed_tokens: int
) -> range:
    """P's blocks to send once `computed_tokens` of the prompt are in P's cache.

    `sent_tokens`: computed when the chunk before was sent. Whole blocks only, but for the
    last chunk. The range is empty when D has them all.
    """
    start = max(cached_tokens, sent_tokens) // block_size
    if computed_tokens >= prompt_tokens:
        return range(start, -(-prompt_tokens // block_size))
    return range(start, computed_tokens // block_size)


def kernel_runs(
    local_blocks: Sequence[int],
    remote_blocks: Sequence[int],
    blocks: range,
    local_scale: int = 1,
    remote_scale: int = 1,
) -> list[Run]:
    """The kernel blocks of P's blocks number `blocks`, merged where both sides run on.

    P's last block may reach beyond D's blocks where D's are shorter: what is beyond holds
    no token of the prompt and is left out.
    """
    runs: list[Run] = []
    stop = min(blocks.stop * local_scale, len(remote_blocks) * remote_scale)
    start = blocks.start * local_scale
    local_next = remote_next = -1
    count = 0
    for k in range(start, stop):
        local = local_blocks[k // local_scale] * local_scale + k % local_scale
        remote = remote_blocks[k // remote_scale] * remote_scale + k % remote_scale
        if count and local == local_next and remote == remote_next:
            count += 1
        else:
            if count:
                runs.append(Run(local_next - count, remote_next - count, count))
            count = 1
        local_next, remote_next = local + 1, remote + 1
    if count:
        runs.append(Run(local_next - count, remote_next - count, count))
    return runs


def layer_writes(
    local: LayerMetadata,
    remote: LayerMetadata,
    runs: Callable[[int, int], Sequence[Run]],
    at: Shard,
) -> Writes:
    """One layer's batch, all tensors. `runs`: the kernel blocks to send, by both sides' scales.

    With one part per D block a run is one write, otherwise each kernel block is one.
    """
    writes = Writes()
    for k, scales in enumerate(zip(local.block_size_scale, remote.block_size_scale, strict=True)):
        ours, theirs = local.block_len[k], remote.block_len[k]
        source, destination = local.kv_caches_base_addr[k], remote.kv_caches_base_addr[k]
        pieces = runs(*scales)
        if at.parts > 1:
            destination += at.part * ours
            pieces = [Run(a + i, b + i, 1) for a, b, blocks in pieces for i in range(blocks)]
        writes.sources += [source + run.local * ours for run in pieces]
        writes.destinations += [destination + run.remote * theirs for run in pieces]
        writes.lengths += [run.blocks * ours for run in pieces]
    return writes
