"""kv_connector_extra_config: what is taken, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from decoded.vllm.connector import DecodedConnector, TransferResults
from decoded.vllm.identity import engine_of, external_id
from decoded.vllm.settings import SettingsError, read_settings
from tests.vllm.engine import cache_config, make_config

DEPLOYED = {
    "prefill": {"dp_size": 2, "tp_size": 8},
    "decode": {"dp_size": 32, "tp_size": 1},
    "tls_config": {"ssl_enable": False, "ssl_certfile": "/etc/a.pem"},
}


def config(tmp_path: Path, extra: dict[str, Any], **transfer: Any) -> Any:
    transfer = {"kv_role": "kv_consumer", **transfer}
    return make_config(tmp_path, {"kv_connector_extra_config": extra, **transfer})


def test_a_deployed_configuration_is_taken_as_it_is(tmp_path: Path) -> None:
    deployed = config(tmp_path, DEPLOYED, kv_port="36000", engine_id="d0")
    settings = read_settings(deployed)
    assert settings.prefill is not None
    assert settings.prefill.tp_size == 8
    assert settings.memory == "auto"
    assert settings.protocol == "tcp"
    assert settings.daemon_endpoint.startswith("ipc://")
    engine = engine_of(deployed)
    assert (engine.engine_id, engine.side_channel_port, engine.world_size) == ("d0", 36000, 1)


def test_ports_by_the_deployed_formula(tmp_path: Path) -> None:
    deployed = config(tmp_path, {}, kv_port=36000)
    deployed.parallel_config.tensor_parallel_size = 4
    deployed.parallel_config.data_parallel_rank = 3
    assert engine_of(deployed).side_channel_port == 36000 + 3 * 4
    deployed.kv_transfer_config.kv_port = 65530
    with pytest.raises(ValueError, match=r"kv_port is 65530: .* 65542 to 65545, beyond"):
        engine_of(deployed)


def test_no_chosen_port_leaves_it_to_the_daemon(tmp_path: Path) -> None:
    assert engine_of(config(tmp_path, {})).side_channel_port is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"endpont": "ipc:///x"}, r"extra_config\.endpont is not known; did you mean endpoint\?"),
        ({"zzz": 1}, r"extra_config\.zzz is not known \(known: endpoint, memory,"),
        ({"endpoint": "http://x"}, r"extra_config\.endpoint is 'http://x': "),
        ({"memory": "pool"}, r"extra_config\.memory is 'pool': .*'shared'"),
        ({"protocol": "udp"}, r"extra_config\.protocol is 'udp'"),
        ({"connect_timeout_s": 0}, r"extra_config\.connect_timeout_s is 0: .*greater than 0"),
        ({"decode": {"tp_size": 0}}, r"extra_config\.decode\.tp_size is 0"),
        ({"decode": {"size": 1}}, r"extra_config\.decode\.size is not known"),
        ({"decode": {"tp_size": 2}}, r"decode\.tp_size is 2, but this engine's .* is 1"),
        (
            {"prefill": {"tp_size": 3}, "decode": {"tp_size": 2}},
            r"prefill\.tp_size is 3: it has to be a multiple of decode\.tp_size, 2",
        ),
        ({"tls_config": {"ssl_enable": "perhaps"}}, r"extra_config\.tls_config\.ssl_enable"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_settings(config(tmp_path, extra))


def test_all_errors_at_once(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings(config(tmp_path, {"memory": "x", "protocol": "y"}, kv_role="kv_both"))
    assert all(key in str(raised.value) for key in ("memory", "protocol", "kv_role is 'kv_both'"))


def test_pipeline_parallel_engines_are_refused(tmp_path: Path) -> None:
    piped = config(tmp_path, {})
    piped.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ValueError, match=r"pipeline_parallel_size is 2: .* set it to 1"):
        engine_of(piped)


def test_external_ids_undo_what_vllm_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    class Numbered:
        def __init__(self, request_id: str) -> None:
            self.request_id = request_id
            self.external_req_id: str | None = None

    for given in ("cmpl-1-0", "chatcmpl-deadbeef", "a-0123abcd", "x"):
        request = Numbered(given)
        InputProcessor.assign_request_id(request)  # type: ignore[arg-type]
        assert request.request_id != given
        assert external_id(request.request_id) == request.external_req_id == given
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    assert external_id("a-0123abcd") == "a-0123abcd"


@pytest.mark.skipif(TransferResults is not None, reason="vLLM 0.32 can be told of failed requests")
def test_where_failures_cannot_be_reported_the_engine_does_not_start(tmp_path: Path) -> None:
    hybrid = config(tmp_path, {})
    with pytest.raises(SettingsError, match=r"2 KV cache groups.*--disable-hybrid-kv-cache"):
        DecodedConnector(hybrid, KVConnectorRole.SCHEDULER, cache_config(2))
