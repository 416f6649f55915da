"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`)."""

from __future__ import annotations


def register() -> None:
    """Make `DecodedConnector` known by name, so that no module path is needed."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM loads plug-ins once per process, but says that they must bear to be loaded again.
    if "DecodedConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "DecodedConnector", "decoded.vllm.connector", "DecodedConnector"
        )
