"""The pure core: states, events, effects and the machine that joins them. Standard library only."""

from .machine import Core
from .settings import CoreSettings

__all__ = ["Core", "CoreSettings"]
