"""A small Llama-like transformer whose attention reads a paged cache.

Prefill computes in tiles of a fixed number of rows, the last one padded, and a decode step
is a tile of one row. A matrix product's bits depend on its shape, so with fixed shapes a
token's K and V depend on the tokens before it and on nothing else: not on how long its
prompt is, which process computes it, or which blocks it lies in. That is what makes it
fair to compare bytes and tokens for equality.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .cache import PagedCache
from .shape import SHAPE, Shape

_SEED = 20_260_801
_EPSILON = 1e-6


@dataclass(frozen=True)
class Layer:
    """Weights, each [inputs, outputs]. `qkv`: query heads, then K heads, then V heads."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """The weights are drawn from a seed, so every process that makes one has the same."""

    def __init__(self, shape: Shape = SHAPE, seed: int = _SEED) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            weights = torch.randn(rows, columns, generator=generator)
            return weights * (scale / math.sqrt(rows))

        width = shape.heads * shape.head_dim
        # Scaled up so that attention picks few positions: tokens then hang on single K and V.
        qkv = width + 2 * shape.kv_heads * shape.head_dim
        self._embedding = draw(shape.vocab, shape.hidden, math.sqrt(shape.vocab))
        self._layers = [
            Layer(
                draw(shape.hidden, qkv, 1.5),
                draw(width, shape.hidden),
                draw(shape.hidden, 2 * shape.mlp),
                draw(shape.mlp, shape.hidden),
            )
            for _ in range(shape.layers)
        ]
        self._head = draw(shape.hidden, shape.vocab)
        exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        self._frequencies = 1.0 / shape.rope_base**exponents

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """A prompt's hidden states before the first layer, [rows, hidden], padded to tiles."""
        tile = self.shape.tile
        padded = [*tokens, *[0] * (-len(tokens) % tile)]
        return self._embedding[torch.tensor(padded)]

    def prefill_layer(
        self,
        index: int,
        hidden: torch.Tensor,
        tokens: int,
        cache: PagedCache,
        blocks: Sequence[int],
    ) -> torch.Tensor:
        """One layer for a whole prompt of `tokens` tokens; its K and V go to the cache."""
        tile = self.shape.tile
        done = []
        for start in range(0, tokens, tile):
            stop = min(start + tile, tokens)
            rows = hidden[start : start + tile]
            done.append(self._run(index, rows, start, stop - start, cache, blocks))
        return torch.cat(done)

    def next_token(
        self, token: int, position: int, cache: PagedCache, blocks: Sequence[int], held: bool
    ) -> int:
        """One decode step: the likeliest token after `token` at `position`.

        `held`: the cache has the K and V of that position already, so none are written.
        """
        hidden = self._embedding[torch.tensor([token])]
        for index in range(self.shape.layers):
            hidden = self._run(index, hidden, position, 0 if held else 1, cache, blocks)
        return int((_norm(hidden) @ self._head).argmax())

    def _run(
        self,
        index: int,
        hidden: torch.Tensor,
        first: int,
        count: int,
        cache: PagedCache,
        blocks: Sequence[int],
    ) -> torch.Tensor:
        """A layer for rows at positions `first`, ...; K and V of the first `count` are new."""
        shape, layer = self.shape, self._layers[index]
        rows = hidden.shape[0]
        width = shape.heads * shape.head_dim
        kv_width = shape.kv_heads * shape.head_dim
        projected = _norm(hidden) @ layer.qkv
        query, key, value = projected.tensor_split((width, width + kv_width), dim=1)
        query = self._rotate(query.view(rows, shape.heads, shape.head_dim), first)
        key = self._rotate(key.view(rows, shape.kv_heads, shape.head_dim), first)
        value = value.view(rows, shape.kv_heads, shape.head_dim)
        cache.write(index, blocks, first, key[:count], value[:count])
        known = first + max(count, 1)
        attended = attention(query, *cache.read(index, blocks, known), first)
        hidden = hidden + attended.reshape(rows, width) @ layer.out
        gate, up = (_norm(hidden) @ layer.gate_up).chunk(2, dim=1)
        return hidden + (functional.silu(gate) * up) @ layer.down

    def _rotate(self, heads: torch.Tensor, first: int) -> torch.Tensor:
        """Rotary position embedding of [rows, heads, head_dim] from position `first` on."""
        positions = torch.arange(first, first + heads.shape[0])
        angles = torch.outer(positions.float(), self._frequencies)[:, None]
        cosine, sine = angles.cos(), angles.sin()
        even, odd = heads.chunk(2, dim=2)
        return torch.cat((even * cosine - odd * sine, odd * cosine + even * sine), dim=2)


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int
) -> torch.Tensor:
    """Causal grouped-query attention of rows at positions `first`, `first + 1`, ...

    `query`: [rows, heads, head_dim]. `keys`, `values`: [known, kv_heads, head_dim], from
    position 0 on. Rows whose own position is not known are padding and get what they get.
    """
    rows, heads, head_dim = query.shape
    known, kv_heads, _ = keys.shape
    padding = (0, 0, 0, 0, 0, first + rows - known)
    keys, values = functional.pad(keys, padding), functional.pad(values, padding)
    # One product per KV head serves all query heads that share it.
    grouped = query.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(kv_heads, -1, head_dim)
    scores = grouped @ keys.permute(1, 2, 0) / math.sqrt(head_dim)
    later = torch.arange(first + rows) > torch.arange(first, first + rows)[:, None]
    scores = scores.view(kv_heads, -1, rows, first + rows).masked_fill(later, -math.inf)
    weights = scores.softmax(dim=-1).view(kv_heads, -1, first + rows)
    mixed = (weights @ values.permute(1, 0, 2)).view(kv_heads, -1, rows, head_dim)
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def decode(
    model: Model, prompt: Sequence[int], cache: PagedCache, blocks: Sequence[int]
) -> Iterator[int]:
    """Greedy decode, without end, of a prompt whose K and V are in `blocks`.

    `blocks` have room for the tokens that are asked for. Like vLLM after a transfer it
    begins by computing the prompt's last token once more.
    """
    token, position, held = prompt[-1], len(prompt) - 1, True
    while True:
        token = model.next_token(token, position, cache, blocks, held)
        yield token
        position, held = position + 1, False


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], eps=_EPSILON)


def prepare_torch() -> None:
    """One thread: the same sums in the same order everywhere. For each thread that computes."""
    torch.set_num_threads(1)
