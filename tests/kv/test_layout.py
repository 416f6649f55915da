from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoded.kv.layout import (
    LayoutError,
    block_offset,
    block_size,
    check_blocks,
    check_layout,
    fetch_bytes,
    fetch_start,
    fetch_stop,
    layer_metadata,
    nothing_to_fetch,
    pool_layout,
)
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region
from decoded.wire.side_channel import LayerMetadata


def layout_of(*tensors: KvTensor, size: int = 1000, blocks: int = 10) -> KvLayout:
    """One group, one layer per tensor, one region."""
    return KvLayout(
        regions=[Region("/r", size)],
        groups=[KvGroup(block_size=4, num_blocks=blocks)],
        layers=[KvLayer(f"layer.{index}", 0, [each]) for index, each in enumerate(tensors)],
    )


@dataclass(frozen=True)
class ConfiguredLayer:
    name: str
    group: int
    tensors: tuple[KvTensor, ...]


groups = st.lists(
    st.builds(KvGroup, block_size=st.integers(1, 64), num_blocks=st.integers(1, 20)),
    min_size=1,
    max_size=3,
)
tensors = st.lists(
    st.builds(KvTensor, st.just(0), st.just(0), st.integers(1, 5000), st.integers(1, 4)),
    min_size=1,
    max_size=3,
)


@st.composite
def pools(draw: st.DrawFn) -> KvLayout:
    of = draw(groups)
    layers = [
        ConfiguredLayer(f"l{index}", draw(st.integers(0, len(of) - 1)), tuple(draw(tensors)))
        for index in range(draw(st.integers(1, 6)))
    ]
    return pool_layout(of, layers, "/pool")


@given(pools())
def test_pool_blocks_lie_in_the_region_and_never_overlap(layout: KvLayout) -> None:
    check_layout(layout)
    spans = []
    for layer in layout.layers:
        for tensor in layer.tensors:
            for block in range(layout.groups[layer.group].num_blocks):
                start = block_offset(tensor, block)
                spans.append((start, start + block_size(tensor)))
    spans.sort()
    assert spans[0][0] >= 0
    assert spans[-1][1] <= layout.regions[0].size
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


@given(pools(), st.integers(0, 2**46))
def test_metadata_leads_a_producer_to_the_same_bytes(layout: KvLayout, base: int) -> None:
    """What P computes from the answer, by the deployed formula, is what D calls the block."""
    metadata = layer_metadata(layout, [base])
    assert list(metadata) == [layer.name for layer in layout.layers]
    for layer in layout.layers:
        answer = metadata[layer.name]
        assert answer.tensor_group_idx == [layer.group] * len(layer.tensors)
        for k, tensor in enumerate(layer.tensors):
            block = layout.groups[layer.group].num_blocks - 1
            scale = answer.block_size_scale[k]
            kernel = [
                answer.kv_caches_base_addr[k] + (block * scale + j) * answer.block_len[k]
                for j in range(scale)
            ]
            assert kernel[0] == base + block_offset(tensor, block)
            assert kernel[-1] + answer.block_len[k] == kernel[0] + block_size(tensor)


@given(pools(), st.integers(0, 200), st.integers(0, 200))
def test_what_is_fetched_agrees_with_counting_token_by_token(
    layout: KvLayout, prompt: int, cached: int
) -> None:
    fetched = 0
    for layer in layout.layers:
        size = layout.groups[layer.group].block_size
        # Blocks with a token that D lacks. P sends from the first of them to the prompt's end.
        lacking = {token // size for token in range(cached, prompt)}
        assert set(range(fetch_start(cached, size), fetch_stop(prompt, cached, size))) == lacking
        fetched += sum(len(lacking) * block_size(tensor) for tensor in layer.tensors)
    assert fetch_bytes(layout, prompt, cached) == fetched
    some = [[1]] * len(layout.groups)
    assert nothing_to_fetch(layout, prompt, cached, some) == (cached >= prompt)
    assert nothing_to_fetch(layout, prompt, cached, [[] for _ in layout.groups])


def test_pool_tensors_start_at_pages_and_the_scale_counts() -> None:
    layers = [ConfiguredLayer("a", 0, (KvTensor(0, 0, 100, 3), KvTensor(0, 0, 7)))]
    layout = pool_layout([KvGroup(16, 20)], layers, "/pool")
    assert [each.offset for each in layout.layers[0].tensors] == [0, 8192]
    assert layout.regions == [Region("/pool", 12288)]


def test_pool_layer_of_an_unknown_group() -> None:
    layers = [ConfiguredLayer("a", 1, (KvTensor(0, 0, 100),))]
    with pytest.raises(LayoutError, match="'a' is in KV group 1, but there are 1 groups"):
        pool_layout([KvGroup(16, 20)], layers, "/pool")


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            KvLayout(
                [Region("/r", 100)],
                [KvGroup(4, 1)],
                [KvLayer("x", 0, [KvTensor(0, 0, 1)]), KvLayer("x", 0, [KvTensor(0, 9, 1)])],
            ),
            "two layers are named 'x'",
        ),
        (
            KvLayout([Region("/r", 9)], [KvGroup(4, 1)], [KvLayer("x", 2, [KvTensor(0, 0, 1)])]),
            "layer 'x' is in KV group 2",
        ),
        (layout_of(KvTensor(3, 0, 10)), "tensor 0 of layer 'layer.0' is in region 3"),
        (layout_of(KvTensor(0, 901, 10)), "ends at byte 1001 .* '/r' has 1000"),
        (layout_of(KvTensor(0, 0, 10, 11)), "ends at byte 1100"),
        (
            layout_of(KvTensor(0, 200, 10), KvTensor(0, 0, 10), KvTensor(0, 99, 1)),
            r"layer 'layer\.1' and tensor 0 of layer 'layer\.2' overlap in region '/r'",
        ),
    ],
)
def test_bad_layouts_are_named(layout: KvLayout, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        check_layout(layout)


def test_neighbours_may_touch_and_groups_may_share_memory() -> None:
    check_layout(layout_of(KvTensor(0, 0, 10), KvTensor(0, 100, 10), KvTensor(0, 900, 10)))
    check_layout(
        KvLayout(
            [Region("/r", 100)],
            [KvGroup(4, 10), KvGroup(4, 10)],
            [KvLayer("full", 0, [KvTensor(0, 0, 10)]), KvLayer("window", 1, [KvTensor(0, 0, 10)])],
        )
    )


def test_metadata_adds_offsets_to_their_own_region() -> None:
    layout = KvLayout(
        [Region("/a", 100), Region("/b", 100)],
        [KvGroup(4, 2)],
        [KvLayer("x", 0, [KvTensor(1, 8, 16, 2), KvTensor(0, 4, 8)])],
    )
    assert layer_metadata(layout, [1000, 5000]) == {
        "x": LayerMetadata([0, 0], [5008, 1004], [16, 8], [2, 1])
    }
    with pytest.raises(LayoutError, match="1 region addresses for 2 regions"):
        layer_metadata(layout, [1000])


@pytest.mark.parametrize(
    ("blocks", "prompt", "text"),
    [
        ([[1, 2]], 8, None),
        ([[1, 2, 3]], 5, None),
        ([[0, 0, 3]], 12, None),
        ([[]], 8, None),
        ([[]], 0, None),
        ([[9]], 4, None),
        ([[1], [2]], 4, "2 block lists, but the layout has 1 KV groups"),
        ([[1, 2]], 9, "KV group 0 has 2 blocks, but 9 prompt tokens need 3 of 4 tokens"),
        ([[10]], 4, "KV group 0 has no block 10: it has 10 blocks"),
        ([[-1, 3]], 4, "KV group 0 has no block -1"),
        ([[3, 0, 3]], 12, "block 3 is twice in the list of KV group 0"),
    ],
)
def test_block_lists(blocks: list[list[int]], prompt: int, text: str | None) -> None:
    problem = check_blocks(layout_of(KvTensor(0, 0, 10)), blocks, prompt)
    assert problem == text if text is None else problem is not None and text in problem


def test_one_empty_group_among_others_is_refused() -> None:
    layout = KvLayout(
        [Region("/r", 100)],
        [KvGroup(4, 5), KvGroup(4, 5)],
        [KvLayer("x", 0, [KvTensor(0, 0, 1)]), KvLayer("y", 1, [KvTensor(0, 50, 1)])],
    )
    problem = check_blocks(layout, [[1], []], 3)
    assert problem is not None
    assert "KV group 1 has 0 blocks" in problem
    assert check_blocks(layout, [[], []], 3) is None
