import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import decoded
from decoded.kv.wheel import CPU_WHEEL, CUDA_WHEEL, EXTRAS, NPU_WHEEL, WheelError, check_wheel

PACKAGE_ROOT = Path(decoded.__file__).parent.parent


def pretend_installed(folder: Path, name: str) -> None:
    info = folder / f"{name.replace('-', '_')}-0.3.13.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3.13\n")


def check_without_site_packages(*folders: Path) -> str:
    """The text of the error that `check_wheel` raises where only `folders` are installed."""
    code = (
        "from decoded.kv.wheel import WheelError, check_wheel\n"
        "try: print('ok', check_wheel())\n"
        "except WheelError as error: print(error)\n"
    )
    path = os.pathsep.join(str(each) for each in (PACKAGE_ROOT, *folders))
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_the_installed_wheel_is_named_without_importing_it() -> None:
    code = (
        "import sys; from decoded.kv.wheel import check_wheel; print(check_wheel());"
        "assert not any(name.split('.')[0] in ('mooncake', 'torch') for name in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in EXTRAS


def test_no_wheel_names_the_extras() -> None:
    text = check_without_site_packages()
    assert "no Mooncake wheel" in text
    assert all(name in text for name in (*EXTRAS, *EXTRAS.values()))


@pytest.mark.parametrize("others", [(CUDA_WHEEL,), (NPU_WHEEL,), (CUDA_WHEEL, NPU_WHEEL)])
def test_two_wheels_are_named_with_the_command_to_remove_them(
    tmp_path: Path, others: tuple[str, ...]
) -> None:
    for name in (CPU_WHEEL, *others):
        pretend_installed(tmp_path, name)
    text = check_without_site_packages(tmp_path)
    assert f"{1 + len(others)} Mooncake wheels" in text
    assert f"pip uninstall {CPU_WHEEL} {' '.join(others)}" in text


def test_a_wheel_whose_files_are_gone_is_told_apart(tmp_path: Path) -> None:
    pretend_installed(tmp_path, CPU_WHEEL)
    text = check_without_site_packages(tmp_path)
    assert f"--force-reinstall --no-deps {CPU_WHEEL}" in text


def test_a_complete_wheel_is_found(tmp_path: Path) -> None:
    pretend_installed(tmp_path, NPU_WHEEL)
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise RuntimeError('was imported')")
    (tmp_path / "mooncake" / "engine.so").touch()
    assert check_without_site_packages(tmp_path) == f"ok {NPU_WHEEL}\n"


def test_missing_ibverbs_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if check_wheel() != CPU_WHEEL:
        pytest.skip("only the CPU wheel is checked for it")

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(WheelError, match="apt-get install libibverbs1"):
        check_wheel()
