"""The demo's transformer in numbers, and the KV layout that follows from them. Without torch."""

from __future__ import annotations

from dataclasses import dataclass

from decoded.kv.layout import pool_layout
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor

BLOCK_SIZE = 16
"""Tokens per block, on P and on D."""

ELEMENT = 4
"""Bytes per element: everything is float32."""


@dataclass(frozen=True)
class Shape:
    """Grouped-query attention: `heads` query heads share `kv_heads` heads of K and V.

    `tile`: rows in which prefill computes, whatever the prompt's length.
    """

    layers: int = 10
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 768
    vocab: int = 4096
    rope_base: float = 10_000.0
    tile: int = 64


SHAPE = Shape()


def block_len(shape: Shape = SHAPE) -> int:
    """Bytes of one block of K, or of V, of one layer."""
    return BLOCK_SIZE * shape.kv_heads * shape.head_dim * ELEMENT


def kv_layers(shape: Shape = SHAPE) -> list[KvLayer]:
    """Every layer with its K and V; where they lie is left to `kv_layout`."""
    tensor = KvTensor(0, 0, block_len(shape))
    return [
        KvLayer(f"model.layers.{index}.self_attn.attn", 0, [tensor, tensor])
        for index in range(shape.layers)
    ]


def kv_layout(num_blocks: int, region: str, shape: Shape = SHAPE) -> KvLayout:
    """One region for all layers. Block 0 is never given to a request."""
    return pool_layout([KvGroup(BLOCK_SIZE, num_blocks)], kv_layers(shape), region)
