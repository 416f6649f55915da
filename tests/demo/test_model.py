"""The demo's model: paged attention is attention, and bits do not hang on what they should not."""

from __future__ import annotations

import dataclasses
import mmap
import random
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch.nn import functional

from decoded.demo.cache import BlockPool, PagedCache
from decoded.demo.model import Model, attention, decode, prepare_torch
from decoded.demo.shape import BLOCK_SIZE, SHAPE, kv_layout

SMALL = dataclasses.replace(SHAPE, layers=3, vocab=512)
BLOCKS = 24


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    prepare_torch()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL)


@pytest.fixture
def cache() -> Iterator[PagedCache]:
    layout = kv_layout(BLOCKS, "test", SMALL)
    with mmap.mmap(-1, layout.regions[0].size) as memory:
        cache = PagedCache(layout, memoryview(memory), SMALL)
        cache.fill(seed=5)
        yield cache
        cache.close()


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [random.Random(seed + n).randrange(SMALL.vocab) for n in range(tokens)]


def prefill(model: Model, tokens: list[int], cache: PagedCache, blocks: list[int]) -> torch.Tensor:
    hidden = model.embed(tokens)
    for index in range(SMALL.layers):
        hidden = model.prefill_layer(index, hidden, len(tokens), cache, blocks)
    return hidden[: len(tokens)]


@pytest.mark.parametrize(("first", "rows"), [(0, 64), (64, 64), (37, 1), (0, 1)])
def test_attention_is_torchs_own(first: int, rows: int) -> None:
    known = first + rows
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(rows, SMALL.heads, SMALL.head_dim, generator=generator)
    keys, values = torch.randn(2, known, SMALL.kv_heads, SMALL.head_dim, generator=generator)
    visible = torch.arange(known) <= torch.arange(first, known)[:, None]
    plain = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=visible,
        enable_gqa=True,
    ).transpose(0, 1)
    torch.testing.assert_close(attention(query, keys, values, first), plain)


def test_padding_changes_nothing() -> None:
    """A tile whose last rows are padding: the rows before them do not see it."""
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(64, SMALL.heads, SMALL.head_dim, generator=generator)
    keys, values = torch.randn(2, 10, SMALL.kv_heads, SMALL.head_dim, generator=generator)
    torch.testing.assert_close(
        attention(query, keys, values, 0)[:10], attention(query[:10], keys, values, 0)
    )


def test_what_is_written_is_read(cache: PagedCache) -> None:
    keys, values = torch.randn(2, 40, SMALL.kv_heads, SMALL.head_dim)
    blocks = [9, 2, 17]
    cache.write(1, blocks, 0, keys[:30], values[:30])
    cache.write(1, blocks, 30, keys[30:], values[30:])
    read_keys, read_values = cache.read(1, blocks, 40)
    assert torch.equal(read_keys, keys)
    assert torch.equal(read_values, values)


def test_bytes_of_a_block_are_where_the_layout_says(cache: PagedCache) -> None:
    tensor = cache.layout.layers[2].tensors[1]
    keys, values = torch.randn(2, BLOCK_SIZE, SMALL.kv_heads, SMALL.head_dim)
    cache.write(2, [7], 0, keys, values)
    dump = cache.dump([7])
    assert dump[-tensor.block_len :] == bytes(values.clone().untyped_storage())
    assert len(dump) == 2 * SMALL.layers * tensor.block_len


def test_blocks_in_any_order_give_the_same_bits(model: Model, cache: PagedCache) -> None:
    tokens = prompt(90)
    in_a_row = prefill(model, tokens, cache, [1, 2, 3, 4, 5, 6])
    assert torch.equal(prefill(model, tokens, cache, [21, 8, 19, 7, 12, 10]), in_a_row)
    assert cache.dump([1, 2, 3, 4, 5]) == cache.dump([21, 8, 19, 7, 12])


@pytest.mark.parametrize("longer", [1, 17, 100])
def test_a_prefix_has_the_same_bits_in_every_prompt(
    model: Model, cache: PagedCache, longer: int
) -> None:
    shared = prompt(5 * BLOCK_SIZE)
    prefill(model, shared, cache, [1, 2, 3, 4, 5])
    prefill(model, shared + prompt(longer, seed=9), cache, list(range(6, 20)))
    assert cache.dump([1, 2, 3, 4, 5]) == cache.dump([6, 7, 8, 9, 10])


def test_decode_goes_on_as_prefill_would(model: Model, cache: PagedCache) -> None:
    """Decode step by step, then prefill prompt and answer: K and V agree."""
    tokens, blocks = prompt(30), [3, 1, 2]
    prefill(model, tokens, cache, blocks)
    answer = list(islice(decode(model, tokens, cache, blocks), 9))
    prefill(model, tokens + answer, cache, [11, 12, 13])
    for index in range(SMALL.layers):
        stepped, at_once = cache.read(index, blocks, 38), cache.read(index, [11, 12, 13], 38)
        torch.testing.assert_close(stepped, at_once, rtol=1e-3, atol=1e-3)


def test_decode_does_not_write_what_is_held(model: Model, cache: PagedCache) -> None:
    tokens, blocks = prompt(2 * BLOCK_SIZE), [3, 4, 5]
    prefill(model, tokens, cache, blocks)
    held = cache.digest([3, 4])
    assert len(list(islice(decode(model, tokens, cache, blocks), 5))) == 5
    assert cache.digest([3, 4]) == held


@pytest.mark.parametrize("lost", [4, 5, 6])
def test_tokens_hang_on_every_block(model: Model, cache: PagedCache, lost: int) -> None:
    tokens, blocks = prompt(3 * BLOCK_SIZE), [4, 5, 6, 7]
    prefill(model, tokens, cache, blocks)
    answer = list(islice(decode(model, tokens, cache, blocks), 12))
    zeros = torch.zeros(BLOCK_SIZE, SMALL.kv_heads, SMALL.head_dim)
    for index in range(SMALL.layers):
        cache.write(index, [lost], 0, zeros, zeros)
    assert list(islice(decode(model, tokens, cache, blocks), 12)) != answer


def test_blocks_are_given_once() -> None:
    pool = BlockPool(12)
    scattered = pool.take(3, scattered=True)
    assert all(abs(a - b) > 1 for a in scattered for b in scattered if a != b)
    taken = [*scattered, *pool.take(5), *pool.take(3)]
    assert sorted(taken) == list(range(1, 12))
    with pytest.raises(RuntimeError, match="1 blocks are wanted, 0 are free"):
        pool.take(1)
