"""What each command says of wrong use, and what needs no daemon."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from decoded import __version__
from decoded.cli import COMMANDS, FAILED, NO_DAEMON, OK, USAGE
from decoded.cli.submit import block_ids

from .conftest import Run

CONFIGS = Path(__file__).parents[2] / "configs"
REAL = ("submit", "--metaserver", "http://127.0.0.1:1", "--block-ids", "1")


def test_help_names_every_command(run: Run) -> None:
    said = run("--help")
    assert said.returncode == OK
    assert all(name in said.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    said = run(command, "--help")
    assert said.returncode == OK
    assert said.stdout.startswith(f"usage: decoded {command}")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("unknown",),
        ("status", "--nonsense"),
        ("status", "--limit", "-1"),
        ("status", "--timeout", "0"),
        ("status", "--set", "link.timeout_s"),
        ("status", "--set", "link.timeout_s=0"),
        ("submit",),
        ("submit", "--virtual", "--timeout", "0"),
        ("submit", "--virtual", "--metaserver", "http://x"),
        ("submit", "--metaserver", "http://x"),
        (*REAL, "--prompt-tokens", "-5"),
        (*REAL, "--prompt-tokens", "5", "--block-ids", "7-4"),
        ("bench",),
        ("bench", "nothing"),
        ("serve", "--config", "/nowhere/decoded.yaml"),
        ("serve", "--set", "log.level=loud"),
        ("serve", "--set", "metaserver.tls.ca_file=/nowhere/ca.pem"),
    ],
)
def test_wrong_use(run: Run, args: tuple[str, ...]) -> None:
    said = run(*args)
    assert said.returncode == USAGE, said
    assert said.stdout == ""
    assert said.stderr
    assert "Traceback" not in said.stderr


def test_block_ids() -> None:
    assert block_ids("4-7,12,3") == [4, 5, 6, 7, 12, 3]
    assert block_ids("") == []
    for wrong in ("a", "1-", "-1", "3-2", "1-2-3", "0-9999999"):
        with pytest.raises(ArgumentTypeError, match=r"neither|no rising range"):
            block_ids(wrong)


def test_version(run: Run) -> None:
    said = json.loads(run("version", "--json").stdout)
    assert said["decoded"] == __version__ == metadata.version("decoded")
    assert said["protocol"] == 1
    assert said["python"] == ".".join(map(str, sys.version_info[:3]))
    assert said["torch"] == metadata.version("torch")
    assert "mooncake-transfer-engine-non-cuda" in said
    assert f"decoded {__version__}" in run("version").stdout.splitlines()
    assert run("--version").stdout == f"decoded {__version__}\n"


@pytest.mark.parametrize("name", ["cpu.yaml", "ascend.yaml"])
def test_check_config_of_the_published_files(run: Run, name: str) -> None:
    for args in (("check-config", CONFIGS / name), ("check-config", "--config", CONFIGS / name)):
        said = run(*args)
        assert (said.returncode, said.stderr) == (OK, "")
        assert said.stdout == f"{CONFIGS / name} is valid\n"


def test_check_config_says_every_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "decoded.yaml"
    path.write_text("link: {timeout_s: 0}\nlog: {level: loud}\n", encoding="utf-8")
    said = run("check-config", path, "--set", "foo=1")
    assert said.returncode == FAILED
    assert "3 errors" in said.stderr
    for key in (f"({path}:1)", f"({path}:2)", "foo: no such key"):
        assert key in said.stderr


def test_check_config_says_which_files_are_missing(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "ca.pem"
    said = run("check-config", "--set", f"metaserver.tls.ca_file={missing}")
    assert said.returncode == FAILED
    assert f"metaserver.tls.ca_file: {missing} is not a file" in said.stderr


def test_check_config_warns(run: Run) -> None:
    said = run("check-config", "--set", "side_channel.base_port=16000")
    assert said.returncode == OK
    assert "warning: side_channel.base_port" in said.stderr


def test_config_shows_what_is_in_force(run: Run) -> None:
    said = run(
        "config",
        DECODED_CONFIG=str(CONFIGS / "ascend.yaml"),
        DECODED_LOG__LEVEL="debug",
    )
    assert said.returncode == OK
    assert "protocol: ascend" in said.stdout
    assert "level: debug" in said.stdout
    assert "# In the environment of Mooncake: ASCEND_TRANSFER_TIMEOUT=33064" in said.stdout
    assert "A drain lasts 67.128 s" in said.stdout


@pytest.mark.parametrize("command", [("status",), ("submit", "--virtual")])
def test_no_daemon(run: Run, folder: Path, command: tuple[str, ...]) -> None:
    said = run(*command, "--endpoint", f"ipc://{folder}/none.sock")
    assert said.returncode == NO_DAEMON
    assert said.stdout == ""
    assert "there is no such socket; start `decoded serve`" in said.stderr


def test_no_daemon_on_tcp(run: Run) -> None:
    said = run("status", "--endpoint", "tcp://127.0.0.1:1", "--timeout", "0.2")
    assert said.returncode == NO_DAEMON
    assert "no daemon answers at tcp://127.0.0.1:1 within 0.2 s" in said.stderr


def test_config_prints_the_schema(run: Run, tmp_path: Path) -> None:
    said = run("config", "schema", DECODED_CONFIG=str(tmp_path / "not-read.yaml"))
    assert said.returncode == OK, said.stderr
    assert set(yaml.safe_load((CONFIGS / "cpu.yaml").read_text())) == set(
        json.loads(said.stdout)["properties"]
    )
    assert run("config", "schema", "--set", "log.level=info").returncode == USAGE


def test_a_file_called_schema_can_be_shown(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "schema"
    path.write_text("log: {level: debug}\n")
    assert "level: debug" in run("config", path).stdout
    assert "level: debug" in run("config", "--config", path).stdout
