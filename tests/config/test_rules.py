"""Rules that join keys, warnings, endpoints, and what the core is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from decoded.config import Config, core_settings, unreadable_files, warnings

KV = {"block_len": 64}
MOVED_PORTS = {"MC_MIN_RPC_PORT": "8000"}


def pool(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"kv": {"pool": {"groups": [{"block_size": 4, "num_blocks": 8}], "layers": layers}}}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"link": {"heartbeat_s": 10, "timeout_s": 10}}, "link.heartbeat_s: 10 s is not below"),
        ({"side_channel": {"bind_host": "::"}}, "side_channel.advertise_host: needed"),
        ({"side_channel": {"advertise_host": "0.0.0.0"}}, "give this node's address"),
        ({"side_channel": {"base_port": 65_000, "ranks": 600}}, "end at port 65599"),
        (pool({"name": "a", "count": 2, "tensors": [KV]}), "names 2 layers alike"),
        (pool({"name": "a", "group": 1, "tensors": [KV]}), "there is no KV group 1"),
        (pool({"name": "a", "tensors": [KV]}, {"name": "a", "tensors": [KV]}), "'a' is there 2"),
        (pool(*[{"name": "{}", "count": 1000, "tensors": [KV]}] * 2), "2000 layers in all"),
        ({"metaserver": {"tls": {"cert_file": "/c"}}}, "metaserver.tls.key_file: needed"),
        ({"metaserver": {"tls": {"key_file": "/k"}}}, "metaserver.tls.cert_file: needed"),
        ({"metaserver": {"tls": {"key_password": "x"}}}, "means nothing without"),
        ({"virtual": {"delay": {"fixed_s": 1, "latency_s": 1}}}, "latency_s"),
        ({"virtual": {"delay": {"latency_s": 1}}}, "bandwidth_bytes_per_s"),
    ],
)
def test_broken_rules(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(tree)
    assert said in str(caught.value)


def test_pool_layers_are_numbered_through() -> None:
    layers = (
        {"name": "model.layers.{}.attn", "count": 2, "tensors": [KV, KV]},
        {"name": "model.layers.{}.linear", "tensors": [KV]},
        {"name": "last", "tensors": [KV]},
    )
    made = Config.model_validate(pool(*layers)).kv.pool
    assert made is not None
    expanded = made.expanded()
    assert [layer.name for layer in expanded] == [
        "model.layers.0.attn",
        "model.layers.1.attn",
        "model.layers.2.linear",
        "last",
    ]
    assert [len(layer.tensors) for layer in expanded] == [2, 2, 1, 1]
    assert all(layer.count == 1 for layer in expanded)


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///a", "ipc:///" + "a" * 106, "tcp://127.0.0.1:5", "tcp://[::1]:65535", "tcp://*:*"],
)
def test_endpoints_that_can_be(endpoint: str) -> None:
    assert Config.model_validate({"link": {"endpoint": endpoint}}).link.endpoint == endpoint


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("/run/decoded.sock", "neither ipc:///absolute/path nor tcp://host:port"),
        ("udp://a:1", "neither ipc"),
        ("ipc://relative.sock", "absolute path"),
        ("ipc://@abstract", "absolute path"),
        ("ipc:///folder/", "absolute path"),
        ("ipc:///" + "a" * 107, "108 bytes long, Linux takes 107"),
        ("ipc:///" + "\N{BLACK STAR}" * 36, "109 bytes long"),
        ("tcp://host", "host:port"),
        ("tcp://:5", "host:port"),
        ("tcp://host:65536", "host:port"),
        ("tcp://host:http", "host:port"),
    ],
)
def test_endpoints_that_cannot_be(endpoint: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Config.model_validate({"link": {"endpoint": endpoint}})


@pytest.mark.parametrize(
    ("tree", "env", "path"),
    [
        ({"metaserver": {"total_timeout_s": 400}}, {}, "metaserver.total_timeout_s"),
        ({"deadlines": {"registration_s": 400}}, {}, "deadlines.registration_s"),
        ({"transfer": {"timeout_s": 30}}, {"MC_TRANSFER_TIMEOUT": "60"}, "transfer.timeout_s"),
        (
            {"transfer": {"timeout_s": 30, "protocol": "ascend", "ascend": {"rdma_retries": 7}}},
            {},
            "transfer.timeout_s",
        ),
        ({"side_channel": {"base_port": 14_999, "ranks": 2}}, {}, "side_channel.base_port"),
        ({"side_channel": {"base_port": 17_000}}, {}, "side_channel.base_port"),
        ({"side_channel": {"base_port": 9_000}}, MOVED_PORTS, "side_channel.base_port"),
        ({}, {"MC_TRANSFER_TIMEOUT": "soon"}, ""),
    ],
)
def test_warnings(tree: dict[str, Any], env: dict[str, str], path: str) -> None:
    assert [warning.path for warning in warnings(Config.model_validate(tree), env)] == [path]


@pytest.mark.parametrize("base_port", [0, 14_999, 17_001, 36_000])
def test_nothing_to_warn_of(base_port: int) -> None:
    config = Config.model_validate({"side_channel": {"base_port": base_port}})
    assert warnings(config, {"MC_TRANSFER_TIMEOUT": "30"}) == []


def test_files_that_are_not_there(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_text("x")
    tls = {"ca_file": str(tmp_path), "cert_file": str(cert), "key_file": str(tmp_path / "key")}
    found = unreadable_files(Config.model_validate({"metaserver": {"tls": tls}}))
    assert [problem.path for problem in found] == [
        "metaserver.tls.ca_file",
        "metaserver.tls.key_file",
    ]
    assert unreadable_files(Config()) == []


def test_what_the_core_is_given() -> None:
    tree = {
        "transfer": {"timeout_s": 40},
        "deadlines": {
            "request_s": 101,
            "registration_s": 102,
            "done_s": 103,
            "drain_margin_s": 2,
        },
        "metaserver": {
            "retries": 2,
            "connect_timeout_s": 5,
            "total_timeout_s": 100,
            "backoff_s": 1,
        },
        "limits": {
            "max_requests": 1,
            "max_unacknowledged": 2,
            "max_tombstones": 3,
            "tombstone_age_s": 4,
        },
    }
    settings = core_settings(Config.model_validate(tree), {})
    assert settings.drain_s == 42
    assert settings.request_deadline_s == 101
    assert settings.registration_deadline_s == 102
    assert settings.done_deadline_s == 103
    # Two failed connections of 5 s, 1 s and 2 s between the tries, then the call itself.
    assert settings.prefill_timeout_s == 2 * 5 + 1 + 2 + 100
    assert (settings.max_requests, settings.max_unacknowledged) == (1, 2)
    assert (settings.max_tombstones, settings.tombstone_age_s) == (3, 4)
