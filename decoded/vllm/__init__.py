"""The vLLM plug-in: a KV connector whose decode side is served by the daemon of its node.

`kv_connector_module_path` is this package, `kv_connector` is `DecodedConnector`. The class
is loaded when it is asked for: vLLM's plug-in loader imports this package in every process.
"""

from __future__ import annotations

from typing import Any

__all__ = ["DecodedConnector"]


def __getattr__(name: str) -> Any:
    if name == "DecodedConnector":
        from .connector import DecodedConnector

        return DecodedConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
