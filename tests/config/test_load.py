"""Layers, errors and where each error is said to come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from decoded.config import Config, ConfigError, load_config
from decoded.config.schema import FixedDelay, TransferDelay


def write(folder: Path, text: str) -> Path:
    path = folder / "decoded.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path | None, flags: dict[str, str], env: dict[str, str]) -> dict[str, str]:
    """Path to whole text of every error."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, flags, env)
    for problem in caught.value.problems:
        assert str(problem) in str(caught.value)
    return {problem.path: str(problem) for problem in caught.value.problems}


def test_nothing_at_all_is_valid() -> None:
    assert load_config(None, {}, {}) == Config()


def test_an_empty_file_and_empty_sections_are_valid(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), {}, {}) == Config()
    assert load_config(write(tmp_path, "link:\nlog:\n  # level: info\n"), {}, {}) == Config()


def test_environment_wins_over_file_and_flags_over_both(tmp_path: Path) -> None:
    path = write(tmp_path, "link: {heartbeat_s: 1, timeout_s: 11, max_sessions: 101}\n")
    env = {"DECODED_LINK__TIMEOUT_S": "12", "DECODED_LINK__MAX_SESSIONS": "102"}
    link = load_config(path, {"link.max_sessions": "103"}, env).link
    assert (link.heartbeat_s, link.timeout_s, link.max_sessions) == (1.0, 12.0, 103)


def test_values_of_flags_and_variables_have_the_type_of_their_key() -> None:
    flags = {
        "transfer.device": "0",
        "metaserver.tls.key_file": "/k",
        "metaserver.tls.cert_file": "/c",
        "metaserver.tls.key_password": "yes",
        "link.endpoint": "null",
        "link.timeout_s": "1e2",
        "virtual.delay": "{fixed_s: 0.5}",
    }
    config = load_config(None, flags, {})
    assert config.transfer.device == "0"
    assert config.metaserver.tls is not None
    assert config.metaserver.tls.key_password is not None
    assert config.metaserver.tls.key_password.get_secret_value() == "yes"
    assert config.metaserver.tls.key_file == Path("/k")
    assert config.link.endpoint is None
    assert config.link.timeout_s == 100.0
    assert config.virtual.delay == FixedDelay(fixed_s=0.5)


def test_both_kinds_of_delay() -> None:
    flags = {
        "virtual.delay.latency_s": "0.1",
        "virtual.delay.bandwidth_bytes_per_s": "2e9",
        "virtual.delay.bytes_per_token": "1024",
    }
    assert load_config(None, flags, {}).virtual.delay == TransferDelay(
        latency_s=0.1, bandwidth_bytes_per_s=2e9, bytes_per_token=1024
    )


def test_every_error_is_said_at_once_with_its_origin(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "link:\n"
        "  heartbeat_s: 20\n"
        "  endpont: ipc:///x\n"
        "side_channel: {bind_host: 0.0.0.0, base_port: 65535, ranks: 4}\n"
        "log: {level: loud}\n"
        "lgo: {level: info}\n",
    )
    found = problems(
        path, {"limits.max_requests": "0"}, {"DECODED_DEADLINES__REQUEST_S": "tomorrow"}
    )
    assert set(found) == {
        "link.heartbeat_s",
        "link.endpont",
        "side_channel.advertise_host",
        "side_channel.base_port",
        "log.level",
        "lgo",
        "limits.max_requests",
        "deadlines.request_s",
    }
    assert f"{path}:2" in found["link.heartbeat_s"]
    assert "did you mean endpoint?" in found["link.endpont"]
    assert f"{path}:3" in found["link.endpont"]
    assert "65538" in found["side_channel.base_port"]
    assert "'debug', 'info', 'warning' or 'error'" in found["log.level"]
    assert "'loud'" in found["log.level"]
    assert "did you mean log?" in found["lgo"]
    assert "command line" in found["limits.max_requests"]
    assert "DECODED_DEADLINES__REQUEST_S" in found["deadlines.request_s"]


def test_a_rule_says_nothing_about_a_key_that_is_wrong_by_itself() -> None:
    found = problems(None, {"link.heartbeat_s": "50", "link.timeout_s": "long"}, {})
    assert set(found) == {"link.timeout_s"}


def test_an_error_in_a_list_is_said_once_and_with_its_index(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "kv:\n"
        "  pool:\n"
        "    groups: [{block_size: 16}]\n"
        "    layers:\n"
        "      - {name: a, tensors: []}\n"
        "      - {name: b, tensors: [{block_length: 1}]}\n",
    )
    found = problems(path, {}, {})
    assert set(found) == {
        "kv.pool.groups.0.num_blocks",
        "kv.pool.layers.0.tensors",
        "kv.pool.layers.1.tensors.0.block_len",
        "kv.pool.layers.1.tensors.0.block_length",
    }
    assert "did you mean block_len?" in found["kv.pool.layers.1.tensors.0.block_length"]
    assert f"{path}:6" in found["kv.pool.layers.1.tensors.0.block_length"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n", "not a map of sections"),
        ("link: {timeout_s: 1\n", "not valid YAML: line"),
        ("link: {timeout_s: 11, timeout_s: 12}\n", "link.timeout_s: said twice"),
        ("link: [1]\n", "link: should be a map of keys"),
        ("kv: {pool: {groups: 1, layers: []}}\n", "kv.pool.groups: should be a list"),
        ("link: {timeout_s: yes}\n", "link.timeout_s: should be a valid number"),
        ("link: {timeout_s: .nan}\n", "link.timeout_s: should be a finite number"),
        ("? [1, 2]\n: 3\n", "no such key"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), {}, {})
    assert said in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", {}, {})
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(binary, {}, {})


def test_flags_that_are_no_yaml() -> None:
    assert "not valid YAML" in problems(None, {"kv.pool": "{a"}, {})["kv.pool"]


@pytest.mark.parametrize("key", ["foo", "link.foo", "kv.pool.foo", ""])
def test_flags_for_keys_that_are_not_there(key: str) -> None:
    assert key in problems(None, {key: "1"}, {})


def test_a_key_below_one_that_has_none() -> None:
    found = problems(None, {"link.endpoint.foo": "1"}, {})
    text = "link.endpoint: should be a valid string, not a map (command line)"
    assert found == {"link.endpoint": text}


def test_variables_of_others_are_left_alone() -> None:
    env = {
        "DECODED_SERVICE_HOST": "10.0.0.1",
        "DECODED_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "DECODED_CONFIG": "/etc/decoded.yaml",
        "LINK__TIMEOUT_S": "nonsense",
    }
    assert load_config(None, {}, env) == Config()


def test_a_variable_with_one_underscore_too_few_is_an_error() -> None:
    with pytest.raises(ConfigError, match="write DECODED_SIDE_CHANNEL__BASE_PORT"):
        load_config(None, {}, {"DECODED_SIDE_CHANNEL_BASE_PORT": "1"})


def test_a_misspelt_variable_is_an_error() -> None:
    found = problems(None, {}, {"DECODED_LINK__TIMEOUT": "5"})
    assert "did you mean timeout_s?" in found["link.timeout"]


def test_the_password_is_nowhere_to_be_read() -> None:
    flags = {
        "metaserver.tls.cert_file": "/c",
        "metaserver.tls.key_file": "/k",
        "metaserver.tls.key_password": "hunter2",
    }
    config = load_config(None, flags, {})
    assert "hunter2" not in repr(config)
    assert "hunter2" not in config.model_dump_json()
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"metaserver.tls.key_password": "[hunter2]", "link.x": "1"}, {})
    assert "hunter2" not in str(caught.value)


def test_the_tree_is_frozen() -> None:
    config = Config()
    with pytest.raises(ValidationError):
        config.link.timeout_s = 1.0  # type: ignore[misc]
