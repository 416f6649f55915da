"""Completion in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decoded.cli import COMMANDS, OK, USAGE

from .conftest import Run, environment

Complete = Callable[[str], set[str]]

# As bash does on TAB: the function that was registered, with the line in variables.
BASH = """
source "$1"
line=$2
registered=$(complete -p decoded)
function=${registered#*-F }
COMP_LINE=$line COMP_POINT=${#line} COMP_TYPE=9
"${function% decoded}" decoded
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete --do-complete=$argv[2]"


def shell(*command: str, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = subprocess.run(
        command,
        env=environment(PATH=path, HOME=str(folder)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")
    return said.stdout


@pytest.fixture(params=["bash", "fish"])
def complete(request: pytest.FixtureRequest, run: Run, tmp_path: Path) -> Complete:
    """Words that the shell offers for a line."""
    name = request.param
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    said = run("completion", name)
    assert said.returncode == OK, said.stderr
    script = tmp_path / "tab"
    script.write_text(said.stdout)

    def complete(line: str) -> set[str]:
        if name == "bash":
            out = shell("bash", "-c", BASH, "bash", str(script), line, folder=tmp_path)
        else:
            out = shell("fish", "--no-config", "-c", FISH, str(script), line, folder=tmp_path)
        # fish adds what a word means.
        return {word.partition("\t")[0].strip() for word in out.splitlines() if word.strip()}

    return complete


def test_commands(complete: Complete) -> None:
    assert complete("decoded ") == set(COMMANDS)
    assert complete("decoded s") == {"serve", "status", "submit"}


def test_options_of_every_command(complete: Complete, run: Run) -> None:
    for command in COMMANDS:
        offered = complete(f"decoded {command} --")
        assert "--help" in offered
        text = run(command, "--help").stdout
        assert offered, command
        assert all(option in text for option in offered)
    assert {"--request-id", "--engine-id", "--set", "--config"} <= complete("decoded status --")


def test_values(complete: Complete, tmp_path: Path) -> None:
    assert complete("decoded completion ") == {"bash", "zsh", "fish"}
    assert complete("decoded proxy --log-level d") == {"debug"}
    assert complete("decoded serve --set link.heart") == {"link.heartbeat_s="}
    assert complete("decoded version ") == set()
    (tmp_path / "node.yaml").touch()
    (tmp_path / "somewhere").mkdir()
    assert complete("decoded check-config n") == {"node.yaml"}
    assert complete("decoded serve --config n") == {"node.yaml"}
    assert complete("decoded config s") == {"schema", "somewhere/"}


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_the_scripts_are_well_formed(run: Run, tmp_path: Path, name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    script = tmp_path / "tab"
    script.write_text(run("completion", name).stdout)
    assert "decoded" in script.read_text()
    assert shell(name, "-n", str(script), folder=tmp_path) == ""


def test_other_shells(run: Run) -> None:
    assert run("completion", "tcsh").returncode == USAGE
    assert run("completion").returncode == USAGE
