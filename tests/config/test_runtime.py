"""The runtime folder and the endpoint in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from decoded.config import (
    Config,
    ConfigError,
    endpoint_of,
    load_config,
    prepare_socket_dir,
    runtime_dir,
)


def test_where_the_runtime_folder_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_dir({"RUNTIME_DIRECTORY": "/run/a:/run/b"}) == Path("/run/a")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert runtime_dir({"XDG_RUNTIME_DIR": "/run/user/0"}) == Path("/run/decoded")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert runtime_dir({"XDG_RUNTIME_DIR": "/run/user/1000"}) == Path("/run/user/1000/decoded")
    assert runtime_dir({"XDG_RUNTIME_DIR": "relative"}) == Path("/tmp/decoded-1000")
    assert runtime_dir({}) == Path("/tmp/decoded-1000")


def test_the_endpoint_is_in_it_unless_configured() -> None:
    env = {"RUNTIME_DIRECTORY": "/run/x"}
    assert endpoint_of(Config(), env) == "ipc:///run/x/decoded.sock"
    configured = Config.model_validate({"link": {"endpoint": "tcp://127.0.0.1:7"}})
    assert endpoint_of(configured, env) == "tcp://127.0.0.1:7"


def test_a_runtime_folder_too_deep_for_a_socket() -> None:
    with pytest.raises(ConfigError, match=r"link\.endpoint: .* bytes long.*set link\.endpoint"):
        load_config(None, {}, {"RUNTIME_DIRECTORY": "/run/" + "deep/" * 30})


def test_the_runtime_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "decoded"
    env = {"RUNTIME_DIRECTORY": str(folder)}
    for _ in range(2):
        prepare_socket_dir(f"ipc://{folder}/decoded.sock", env)
        assert folder.stat().st_mode & 0o777 == 0o700


def test_no_other_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make it, or set"):
        prepare_socket_dir(f"ipc://{tmp_path}/other/x.sock", {"RUNTIME_DIRECTORY": "/run/x"})
    prepare_socket_dir(f"ipc://{tmp_path}/x.sock", {"RUNTIME_DIRECTORY": "/run/x"})
    prepare_socket_dir("tcp://127.0.0.1:1", {"RUNTIME_DIRECTORY": "/nowhere"})
    assert list(tmp_path.iterdir()) == []


def test_a_runtime_folder_that_others_can_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "decoded"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=f"chmod 700 {folder}"):
        prepare_socket_dir(f"ipc://{folder}/decoded.sock", {"RUNTIME_DIRECTORY": str(folder)})


def test_a_runtime_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    link = tmp_path / "decoded"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        prepare_socket_dir(f"ipc://{link}/decoded.sock", {"RUNTIME_DIRECTORY": str(link)})


def test_a_runtime_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        prepare_socket_dir(f"ipc://{tmp_path}/d.sock", {"RUNTIME_DIRECTORY": str(tmp_path)})


def test_a_runtime_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "decoded"
    with pytest.raises(OSError, match="cannot make the runtime folder"):
        prepare_socket_dir(f"ipc://{folder}/d.sock", {"RUNTIME_DIRECTORY": str(folder)})
