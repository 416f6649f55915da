"""What can be wrong with KV memory."""

from __future__ import annotations


class RegionError(RuntimeError):
    """Memory that cannot be had; the text says why and what to do."""
