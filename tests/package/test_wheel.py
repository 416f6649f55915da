"""What a user installs: the wheel, its metadata and its command."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from decoded import __version__

ROOT = Path(__file__).parents[2]
MOONCAKE = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "cuda": "mooncake-transfer-engine",
    "npu": "mooncake-transfer-engine-npu",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True, timeout=100)
    (path,) = folder.glob("*.whl")
    assert path.name == f"decoded-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"decoded-{__version__}.dist-info/METADATA").decode())


def test_every_module_is_in_it_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "decoded"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert packed == {name for name in tracked if (ROOT / name).is_file()}


def test_it_is_typed_and_licensed(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert "decoded/py.typed" in wheel.namelist()
    assert metadata["License-Expression"] == "Apache-2.0"
    licence = wheel.read(f"decoded-{__version__}.dist-info/licenses/LICENSE").decode()
    assert "Apache License" in licence
    assert licence == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_each_extra_brings_one_mooncake(metadata: Message) -> None:
    required = metadata.get_all("Requires-Dist") or []
    assert set(metadata.get_all("Provides-Extra") or []) == {*MOONCAKE, "dev", "proxy"}
    for extra, wanted in MOONCAKE.items():
        mine = [line for line in required if f"extra == '{extra}'" in line]
        engines = [line.split(">")[0] for line in mine if line.startswith("mooncake")]
        assert engines == [wanted]
    core = [line for line in required if "extra ==" not in line]
    assert not [line for line in core if line.startswith(("torch", "mooncake", "vllm"))]


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    entry_points = wheel.read(f"decoded-{__version__}.dist-info/entry_points.txt").decode()
    assert "decoded = decoded.cli:main" in entry_points
    assert "[vllm.general_plugins]\ndecoded = decoded.vllm.plugin:register" in entry_points
    command = Path(sys.executable).with_name("decoded")
    said = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert said.stdout == f"decoded {__version__}\n"
