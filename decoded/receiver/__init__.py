"""The layerwise KV receiver: ranks with registered memory, side channels, and the path of a
real request through them.
"""

from .path import ReceiverPath

__all__ = ["ReceiverPath"]
