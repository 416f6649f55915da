"""Which names of CANN the installed wheels need, and which a library gives: read from the files."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

CANN = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl|_ZNK?4adxl|_ZNK?2ge)")
"""What CANN's own names start with. (`rt` alone would meet libc's and torch's.)"""

OUT_OF_SCOPE = ("torch_npu/lib/libop_plugin_atb.so", "torch_npu/dynamo/")
"""Parts of torch_npu that need further CANN libraries and are loaded only on demand."""


def package_folder(name: str) -> Path:
    """The folder of an installed package, without running any of it.

    Raises ModuleNotFoundError.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed: scripts/test --npu sets it up")
    return Path(spec.submodule_search_locations[0])


def headers() -> Path:
    """The folder with CANN's headers as torch_npu ships them."""
    return package_folder("torch_npu") / "include"


def wheel_libraries() -> list[Path]:
    """The libraries of torch_npu and Mooncake that have to work over the stand-in."""
    found = []
    for package in ("torch_npu", "mooncake"):
        folder = package_folder(package)
        for path in sorted(folder.rglob("*.so*")):
            name = path.relative_to(folder.parent).as_posix()
            if not name.startswith(OUT_OF_SCOPE):
                found.append(path)
    return found


def imported(library: Path) -> set[str]:
    """CANN's names that a library expects others to have, weak ones included."""
    return {name for name in _names(library, "--undefined-only") if CANN.match(name)}


def exported(file: Path) -> set[str]:
    """All names that a library, or an object file, gives to others.

    Without the weak ones: those are C++ templates and the like, which every user has too.
    """
    return _names(file, "--defined-only", "TDBR")


def imported_by_wheels() -> dict[str, list[str]]:
    """Each imported name of CANN with the files that import it."""
    importers: dict[str, list[str]] = {}
    for library in wheel_libraries():
        for name in imported(library):
            importers.setdefault(name, []).append(library.name)
    return importers


def mentioned_in_wheels() -> set[str]:
    """Words in the wheels' libraries that could be names to look up while they run (dlsym)."""
    words: set[str] = set()
    for library in wheel_libraries():
        found = re.findall(rb"(?<=\0)[A-Za-z_]\w{3,}(?=\0)", library.read_bytes())
        words.update(word.decode() for word in found)
    return words


def _names(file: Path, which: str, kinds: str | None = None) -> set[str]:
    """The names that `nm` lists, of these of its kinds or of all."""
    dynamic = [] if file.suffix == ".o" else ["--dynamic"]
    out = subprocess.run(
        ["nm", *dynamic, "--extern-only", "--format=posix", which, str(file)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line.split() for line in out.splitlines()]
    return {name.partition("@")[0] for name, kind, *_ in lines if kinds is None or kind in kinds}
