"""The plan of a layer's writes against a naive copy, token by token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoded.producer import plan
from decoded.producer.errors import PlanError
from decoded.wire.side_channel import LayerMetadata


@dataclass(frozen=True)
class Side:
    """One side of a request in a group: its blocks and how they are cut into kernel blocks."""

    block_ids: list[int]
    block_size: int
    scale: int
    num_blocks: int

    def kernel_block(self, token: int, kernel_size: int) -> int:
        block = self.block_ids[token // self.block_size]
        return block * self.scale + token % self.block_size // kernel_size


@st.composite
def _side(draw: st.DrawFn, prompt: int, kernel_size: int, scale: int) -> Side:
    block_size = kernel_size * scale
    needed = -(-prompt // block_size)
    num_blocks = needed + draw(st.integers(1, 6))
    ids: list[int] = draw(st.permutations(range(1, num_blocks)))
    if draw(st.booleans()):
        ids = sorted(ids)
    return Side(ids[:needed], block_size, scale, num_blocks)


@dataclass(frozen=True)
class Case:
    prompt: int
    cached: int
    kernel_size: int
    local: Side
    remote: Side
    lengths: list[int]
    parts: int


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    prompt = draw(st.integers(1, 60))
    kernel_size = draw(st.sampled_from([1, 2, 4]))
    local = draw(_side(prompt, kernel_size, draw(st.sampled_from([1, 2, 3]))))
    remote = draw(_side(prompt, kernel_size, draw(st.sampled_from([1, 2, 3, 6]))))
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    cached = draw(st.integers(0, prompt))
    return Case(prompt, cached, kernel_size, local, remote, lengths, draw(st.sampled_from([1, 2])))


def _metadata(side: Side, lengths: list[int], base: int) -> tuple[LayerMetadata, int]:
    """Tensors one after the other from `base`; also where they end."""
    addresses = []
    for length in lengths:
        addresses.append(base)
        base += length * side.scale * side.num_blocks
    count = len(lengths)
    return LayerMetadata([0] * count, addresses, lengths, [side.scale] * count), base


def _apply(writes: plan.Writes, source: bytes, target: bytearray) -> None:
    for src, dst, length in zip(writes.sources, writes.destinations, writes.lengths, strict=True):
        assert 0 <= src <= src + length <= len(source)
        assert 0 <= dst <= dst + length <= len(target)
        target[dst : dst + length] = source[src : src + length]


@given(_cases(), st.data())
def test_writes_equal_a_copy_of_every_kernel_block(case: Case, data: st.DataObject) -> None:
    part = data.draw(st.integers(0, case.parts - 1))
    local, local_end = _metadata(case.local, case.lengths, 0)
    remote_lengths = [length * case.parts for length in case.lengths]
    remote, remote_end = _metadata(case.remote, remote_lengths, 0)
    source = bytes(1 + i % 255 for i in range(local_end))
    at = plan.Shard(case.parts, part)

    expected = bytearray(remote_end)
    first = case.cached // case.local.block_size * case.local.block_size
    for token in range(first, case.prompt):
        ours = case.local.kernel_block(token, case.kernel_size)
        theirs = case.remote.kernel_block(token, case.kernel_size)
        for k, length in enumerate(case.lengths):
            src = local.kv_caches_base_addr[k] + ours * length
            dst = remote.kv_caches_base_addr[k] + theirs * remote.block_len[k] + part * length
            expected[dst : dst + length] = source[src : src + length]

    # Chunked: any rising sequence of computed tokens that ends with the prompt.
    steps = [*sorted(data.draw(st.lists(st.integers(0, case.prompt), max_size=3))), case.prompt]
    found, sent, written = bytearray(remote_end), 0, set[int]()
    for computed in steps:
        blocks = plan.chunk_range(case.local.block_size, case.prompt, case.cached, sent, computed)
        sent = computed
        runs = partial(plan.kernel_runs, case.local.block_ids, case.remote.block_ids, blocks)
        writes = plan.layer_writes(local, remote, runs, at)
        _apply(writes, source, found)
        assert not written & set(blocks) or computed == case.prompt
        written |= set(blocks)
    # The rest of the last block is copied as far as both sides have it; it holds no token.
    common = min(
        len(case.local.block_ids) * case.local.scale,
        len(case.remote.block_ids) * case.remote.scale,
    )
    for index in range(-(-case.prompt // case.kernel_size), common):
        theirs = case.remote.kernel_block(index * case.kernel_size, case.kernel_size)
        for k, length in enumerate(case.lengths):
            dst = remote.kv_caches_base_addr[k] + theirs * remote.block_len[k] + part * length
            found[dst : dst + length] = expected[dst : dst + length]
    assert found == expected


@given(_cases())
def test_runs_are_as_long_as_can_be(case: Case) -> None:
    blocks = range(len(case.local.block_ids))
    runs = plan.kernel_runs(
        case.local.block_ids, case.remote.block_ids, blocks, case.local.scale, case.remote.scale
    )
    for before, after in itertools.pairwise(runs):
        ends = before.local + before.blocks, before.remote + before.blocks
        assert ends != (after.local, after.remote)
    total = min(len(blocks) * case.local.scale, len(case.remote.block_ids) * case.remote.scale)
    assert sum(run.blocks for run in runs) == total


def test_contiguous_blocks_are_one_write_per_tensor() -> None:
    local = LayerMetadata([0, 0], [1000, 5000], [10, 20], [1, 1])
    remote = LayerMetadata([0, 0], [100, 300], [10, 20], [1, 1])
    runs = partial(plan.kernel_runs, [4, 5, 6, 9], [1, 2, 3, 7], range(4))
    writes = plan.layer_writes(local, remote, runs, plan.Shard())
    assert list(zip(writes.sources, writes.destinations, writes.lengths, strict=True)) == [
        (1040, 110, 30),
        (1090, 170, 10),
        (5080, 320, 60),
        (5180, 440, 20),
    ]
    assert writes.nbytes == 120


def test_parts_of_a_block_are_one_write_per_kernel_block() -> None:
    local = LayerMetadata([0], [1000], [10], [2])
    remote = LayerMetadata([0], [0], [20], [2])
    runs = partial(plan.kernel_runs, [1], [3], range(1))
    writes = plan.layer_writes(local, remote, runs, plan.Shard(2, 1))
    assert list(zip(writes.sources, writes.destinations, writes.lengths, strict=True)) == [
        (1020, 130, 10),
        (1030, 150, 10),
    ]


@pytest.mark.parametrize(
    ("prompt", "cached", "sent", "computed", "expected"),
    [
        (40, 0, 0, 40, range(3)),
        (40, 16, 0, 40, range(1, 3)),
        (40, 31, 0, 40, range(1, 3)),
        (40, 0, 0, 39, range(2)),
        (40, 0, 20, 40, range(1, 3)),
        (40, 32, 20, 40, range(2, 3)),
        (32, 32, 0, 32, range(0)),
        (5, 0, 0, 5, range(1)),
        (5, 0, 0, 4, range(0)),
    ],
)
def test_chunk_range(prompt: int, cached: int, sent: int, computed: int, expected: range) -> None:
    assert plan.chunk_range(16, prompt, cached, sent, computed) == expected


def _layers(lengths: list[int], group: int = 0) -> dict[str, LayerMetadata]:
    count = len(lengths)
    return {"layers.0": LayerMetadata([group] * count, [0] * count, lengths, [1] * count)}


@pytest.mark.parametrize(
    ("ratio", "local", "remote", "shards"),
    [
        (1, [8, 8], [8, 8], [plan.Shard(1, 0, True)] * 2),
        (2, [8, 8], [16, 16], [plan.Shard(2, 0, True), plan.Shard(2, 1, True)] * 2),
        # MLA: every P rank has everything, one sends.
        (2, [8, 4], [8, 4], [plan.Shard(1, 0, True), plan.Shard(1, 0, False)]),
        # Two KV heads on four P ranks: two ranks hold each.
        (4, [8], [16], [plan.Shard(2, part, sends) for part in (0, 1) for sends in (True, False)]),
    ],
)
def test_shard(ratio: int, local: list[int], remote: list[int], shards: list[plan.Shard]) -> None:
    found = [plan.shard(_layers(local), _layers(remote), r, ratio) for r in range(len(shards))]
    assert found == shards


@pytest.mark.parametrize(
    ("ratio", "local", "remote", "text"),
    [
        (1, _layers([8]), {}, "D has no layer 'layers.0'"),
        (1, _layers([8]), _layers([8], group=1), r"KV groups per tensor are \[0\] on P, \[1\]"),
        (1, _layers([8]), _layers([8, 8]), "KV groups per tensor"),
        (1, _layers([8]), _layers([16]), "block_len is 8 on P, 16 on D"),
        (1, _layers([16]), _layers([8]), "block_len is 16 on P, 8 on D"),
        (2, _layers([8]), _layers([24]), "with 2 P ranks per D rank"),
        (2, _layers([8]), _layers([12]), "block_len is 8 on P, 12 on D"),
        (2, _layers([8, 8]), _layers([16, 8]), "1 parts here, 2 in layers before"),
        (1, {}, {}, "P has no layers"),
    ],
)
def test_memory_that_does_not_fit(
    ratio: int, local: dict[str, LayerMetadata], remote: dict[str, LayerMetadata], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        plan.shard(local, remote, 0, ratio)


def test_layers_that_only_d_has_are_left_alone() -> None:
    remote = _layers([8]) | {"draft.0": LayerMetadata([0], [0], [4], [1])}
    assert plan.shard(_layers([8]), remote, 0, 1) == plan.Shard()


def test_remote_rank() -> None:
    assert [plan.remote_rank(rank, 8, 2) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(PlanError, match="4 is not a multiple of D's 3"):
        plan.remote_rank(0, 4, 3)
    with pytest.raises(PlanError, match="2 is not a multiple of D's 4"):
        plan.remote_rank(0, 2, 4)


def test_check_blocks() -> None:
    one, two = (LayerMetadata([0], [0], [8], [scale]) for scale in (1, 2))
    plan.check_blocks("l", one, two, 16, 32, remote_blocks=2, prompt_tokens=64)
    with pytest.raises(PlanError, match="16/1 tokens on P, 16/2 on D"):
        plan.check_blocks("l", one, two, 16, 16, remote_blocks=9, prompt_tokens=1)
    with pytest.raises(PlanError, match="2 blocks of 32 tokens, too few for a prompt of 65"):
        plan.check_blocks("l", one, two, 16, 32, remote_blocks=2, prompt_tokens=65)
