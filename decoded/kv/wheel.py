"""Which Mooncake wheel is installed, found without importing it."""

from __future__ import annotations

import ctypes
import importlib.util
from importlib import metadata
from pathlib import Path

CPU_WHEEL = "mooncake-transfer-engine-non-cuda"
CUDA_WHEEL = "mooncake-transfer-engine"
NPU_WHEEL = "mooncake-transfer-engine-npu"

EXTRAS = {CPU_WHEEL: "cpu", CUDA_WHEEL: "cuda", NPU_WHEEL: "npu"}
"""Each wheel with the extra of this package that brings it."""


class WheelError(RuntimeError):
    """Mooncake cannot be used as installed; the text says what to do."""


def check_wheel() -> str:
    """The name of the one installed Mooncake distribution.

    All wheels install the same module, `mooncake`, so two of them overwrite each
    other's files. Raises WheelError when there is none, more than one, when the files
    of the one are gone, or when the system library it needs is missing.
    """
    found = [name for name in EXTRAS if _is_installed(name)]
    if not found:
        raise WheelError(
            "no Mooncake wheel is installed; install one of "
            f"{', '.join(EXTRAS)}, or this package with one of its extras: "
            f"{', '.join(EXTRAS.values())}"
        )
    if len(found) > 1:
        raise WheelError(
            f"{len(found)} Mooncake wheels are installed ({', '.join(found)}) and overwrite each "
            f"other's files; pip uninstall {' '.join(found)}, then install exactly one"
        )
    (name,) = found
    if not _has_engine():
        raise WheelError(
            f"{name} is installed, but its module mooncake.engine is gone (removed with another "
            f"Mooncake wheel?); pip install --force-reinstall --no-deps {name}"
        )
    if name == CPU_WHEEL:
        _check_ibverbs(name)
    return name


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _has_engine() -> bool:
    """Whether `mooncake.engine` is there, without running any of the package's code."""
    spec = importlib.util.find_spec("mooncake")
    folders = spec.submodule_search_locations if spec is not None else None
    return any(any(Path(folder).glob("engine*.so")) for folder in folders or ())


def _check_ibverbs(name: str) -> None:
    """The CPU wheel links the system's libibverbs, for TCP too (tried with 0.3.13.post1)."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as error:
        raise WheelError(
            f"{name} needs the system library libibverbs.so.1 ({error}); "
            "install it: apt-get install libibverbs1, or dnf install libibverbs"
        ) from None
