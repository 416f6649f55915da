"""The daemon: composition, the one route of events and effects, start and stop."""

from .serve import serve

__all__ = ["serve"]
