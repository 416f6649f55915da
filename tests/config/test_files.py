"""The configurations that are published: valid, complete, and every key explained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from decoded.config import Config, load_config, warnings
from decoded.config.schema import Section
from decoded.config.sources import keys_at

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def all_keys(path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the tree, those of optional parts included."""
    for key in keys_at(path):
        yield (*path, key)
        yield from all_keys((*path, key))


def flat(values: dict[str, Any], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for key, value in values.items():
        found.add((*path, key))
        if isinstance(value, dict):
            found |= flat(value, (*path, key))
    return found


def test_there_are_two() -> None:
    assert [path.name for path in FILES] == ["ascend.yaml", "cpu.yaml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_published_file_is_valid(path: Path) -> None:
    config = load_config(path, {}, {})
    assert warnings(config, {}) == []
    assert config.transfer.protocol == {"cpu": "tcp", "ascend": "ascend"}[path.stem]


def test_the_cpu_file_says_the_defaults() -> None:
    assert load_config(CONFIGS / "cpu.yaml", {}, {}) == Config()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    said = flat(yaml.safe_load(text))
    for key in all_keys():
        # What lies in a part that is null here is shown in a comment.
        commented = re.search(rf"^ *#[ -]*{key[-1]}:", text, re.MULTILINE)
        assert key in said or (len(key) > 2 and commented), ".".join(key)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_explained(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    for before, line in zip(["", *lines], lines, strict=False):
        if re.match(r" *[a-z_]+:", line):
            assert before.lstrip().startswith("#"), line


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_examples_in_comments_are_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = []
    for section, key in (("kv", "pool"), ("metaserver", "tls"), ("virtual", "delay")):
        for block in re.findall(rf"^(  # {key}:\n(?:  #   .*\n)+)", text, re.MULTILINE):
            example = yaml.safe_load(re.sub(r"^  # ", "", block, flags=re.MULTILINE))
            value: Section = getattr(
                getattr(Config.model_validate({section: example}), section), key
            )
            found.append((key, type(value).__name__))
    assert found == [
        ("pool", "PoolConfig"),
        ("tls", "TlsConfig"),
        ("delay", "FixedDelay"),
        ("delay", "TransferDelay"),
    ]
