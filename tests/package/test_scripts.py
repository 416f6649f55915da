"""scripts/_setup, with an interpreter that writes down what it is asked instead of installing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands for both the system's Python and .venv's. `-m venv DIR` puts a copy of it there.
PYTHON = """#!/bin/bash
printf '%s\\n' "$*" >>"$FAKE_LOG"
case "$*" in
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip install "*) [ ! -e "$FAKE_LOG.broken" ] ;;
*) exec "$FAKE_PYTHON" "$@" ;;
esac
"""
SETUP = "set -euo pipefail\nsource scripts/_setup\n_verbs_loads() { true; }\n"


class Checkout:
    """A checkout in a folder with spaces, without an environment."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a check out"
        self.venv = self.root / ".venv"
        self.log = folder / "log"
        for name in ("scripts/_setup", "pyproject.toml", "constraints-cpu.txt"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "decoded").mkdir()
        shutil.copy(ROOT / "decoded" / "__init__.py", self.root / "decoded")
        self.python = folder / "python"
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def bash(self, code: str) -> subprocess.CompletedProcess[str]:
        variables = {
            "FAKE_LOG": str(self.log),
            "FAKE_PYTHON": sys.executable,
            "PYTHON": str(self.python),
        }
        return subprocess.run(
            ["bash", "-c", SETUP + code],
            cwd=self.root,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def set_up(self) -> list[str]:
        """Set up; what was made and installed on the way."""
        self.log.unlink(missing_ok=True)
        said = self.bash("setup_environment")
        assert said.returncode == 0, said.stderr
        asked = self.log.read_text().splitlines()
        return [line.split()[1] for line in asked if line.startswith(("-m venv", "-m pip"))]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_run_installs_and_the_second_does_not(checkout: Checkout) -> None:
    assert checkout.set_up() == ["venv", "pip"]
    assert "-c constraints-cpu.txt -e .[cpu,dev]" in checkout.log.read_text()
    assert checkout.set_up() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints-cpu.txt"])
def test_a_change_is_installed_into_what_is_there(checkout: Checkout, name: str) -> None:
    checkout.set_up()
    with (checkout.root / name).open("a") as file:
        file.write("\n# changed\n")
    assert checkout.set_up() == ["pip"]
    assert checkout.set_up() == []


def test_what_was_cut_off_is_made_anew(checkout: Checkout) -> None:
    broken = Path(f"{checkout.log}.broken")
    broken.touch()
    said = checkout.bash("setup_environment")
    assert said.returncode == 1
    assert "pip could not install the packages" in said.stderr
    (checkout.venv / "left over").touch()
    broken.unlink()
    assert checkout.set_up() == ["venv", "pip"]
    assert not (checkout.venv / "left over").exists()


def test_an_environment_without_an_interpreter_is_made_anew(checkout: Checkout) -> None:
    checkout.set_up()
    (checkout.venv / "bin" / "python").unlink()
    assert checkout.set_up() == ["venv", "pip"]


def test_an_environment_made_by_hand_is_kept(checkout: Checkout) -> None:
    checkout.bash(f"'{checkout.python}' -m venv '{checkout.venv}'")
    assert checkout.set_up() == ["pip"]


def test_a_checkout_that_was_moved_gets_its_own(checkout: Checkout) -> None:
    checkout.set_up()
    moved = checkout.root.with_name("elsewhere")
    checkout.root.rename(moved)
    checkout.root, checkout.venv = moved, moved / ".venv"
    assert checkout.set_up() == ["venv", "pip"]


def test_two_at_once_install_once(checkout: Checkout) -> None:
    checkout.log.touch()
    said = checkout.bash("setup_environment & a=$!; setup_environment & b=$!; wait $a; wait $b")
    assert said.returncode == 0, said.stderr
    assert checkout.log.read_text().count("-m pip install") == 1


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "_is_root() { false; }; apt-get() { true; }; _need_packages 'The library' libfoo1",
            "The library is missing. Run this, then try again: "
            "sudo apt-get update && sudo apt-get install -y libfoo1",
        ),
        (
            "_is_root() { true; }; apt-get() { false; }; _need_packages 'The library' libfoo1",
            "The library is missing, and 'apt-get install libfoo1' failed",
        ),
        (
            "PATH=/nowhere; _need_packages 'The library' libfoo1",
            "On Debian and Ubuntu the package is: libfoo1",
        ),
        ("PYTHON=/nowhere/python; PATH=/nowhere; _find_python", "no Python 3.10 or newer"),
    ],
)
def test_what_is_missing_is_named(checkout: Checkout, code: str, said: str) -> None:
    ended = checkout.bash(code)
    assert ended.returncode == 1
    assert said in ended.stderr


def test_a_missing_venv_module_is_named(checkout: Checkout) -> None:
    lacking = PYTHON.replace("*) exec", '*"import ensurepip"*) exit 1 ;;\n*) exec')
    checkout.python.write_text(lacking)
    said = checkout.bash("_is_root() { false; }; apt-get() { true; }; setup_environment")
    assert said.returncode == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"apt-get install -y python{version}-venv" in said.stderr
