"""The stand-in and the wheels agree on names: a new wheel that needs more shows here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import symbols
from .build import LIBRARIES, build
from .environ import environment

OWN = re.compile(r"_ZNK?7standin")
"""How the stand-in's libraries call each other; CANN has no such names."""

USED_BY_NO_WHEEL = {
    "_ZNK2ge12AscendString9GetStringEv": "libllm_datadist reads what Mooncake hands over",
    "_ZN2ge12AscendStringC2EPKc": "the compiler's second name of the imported constructor",
    "_ZN4adxl10AdxlEngineC2Ev": "the same",
    "_ZN4adxl10AdxlEngineD2Ev": "the same, of the destructor",
}
"""Names given although no wheel asks for them, each with the reason."""


@pytest.fixture(scope="module")
def libraries() -> dict[str, Path]:
    folder = build() / "lib64"
    return {library.name: folder / f"lib{library.name}.so" for library in LIBRARIES}


@pytest.fixture(scope="module")
def exported(libraries: dict[str, Path]) -> set[str]:
    return {name for path in libraries.values() for name in symbols.exported(path)}


def test_every_library_is_there(libraries: dict[str, Path]) -> None:
    assert [path for path in libraries.values() if not path.is_file()] == []


def test_every_imported_name_is_exported(exported: set[str]) -> None:
    imported = symbols.imported_by_wheels()
    assert len(imported) > 100, "the wheels' imports were not read"
    assert {name: users for name, users in imported.items() if name not in exported} == {}


def test_every_exported_name_has_a_user(exported: set[str]) -> None:
    own = {name for name in exported if OWN.match(name)}
    used = set(symbols.imported_by_wheels()) | symbols.mentioned_in_wheels()
    assert exported - own - used == set(USED_BY_NO_WHEEL)


def test_the_linker_finds_every_function_at_once() -> None:
    """Also those whose names do not look like CANN's."""
    program = "import torch, torch_npu, mooncake.engine, mooncake.store"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment() | {"LD_BIND_NOW": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
