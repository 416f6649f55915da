"""What the tests know of the memory of `nodes`, which they cannot import: torch needs a device."""

from __future__ import annotations

LAYERS, BLOCKS, BLOCK_SIZE = 3, 8, 16
WIDTH = 4096
"""Bytes of a block of K, or of V."""
