"""Build the stand-in's libraries; `python -m tests.ascend.build` prints where they are.

They go into the environment that runs this, in a folder named after everything they are made
from: a second build with the same sources, wheels and compiler finds them there.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import symbols

SOURCES = Path(__file__).parent / "runtime"
WHEELS = ("torch_npu", "mooncake-transfer-engine-npu")
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-DFUNC_VISIBILITY"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-deprecated-declarations"),
)
"""CANN's headers mark deprecated what the wheels still call."""
FOLDERS = ("lib64", "compiler", "opp", "runtime")
"""torch_npu insists on these in CANN's folder; all but the first stay empty."""


@dataclass(frozen=True)
class Library:
    """One library: its name without lib and .so, its sources and what it links."""

    name: str
    sources: tuple[str, ...]
    needs: tuple[str, ...] = ()


RUNTIME = Library("ascendcl", ("*.cpp",))
"""Everything in the folder itself that is no other library's."""
LIBRARIES = (
    RUNTIME,
    Library("metadef", ("ascend_string.cpp",)),
    Library("opapi", ("operators/*.cpp",), ("ascendcl",)),
    Library("llm_datadist", ("adxl/*.cpp",), ("ascendcl", "metadef")),
    *(
        Library(name, ("empty.cpp",), ("ascendcl",))
        for name in ("hccl", "acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph")
    ),
)


class BuildError(RuntimeError):
    """The stand-in cannot be built; the text says what to do."""


def build() -> Path:
    """What takes the place of CANN's folder, with the libraries in `lib64`.

    They are built if they are not there yet.
    """
    compiler = shutil.which("g++")
    if compiler is None or shutil.which("nm") is None:
        raise BuildError("g++ and nm are needed; on Debian: apt-get install g++")
    folder = Path(sys.prefix) / "ascend-standin" / fingerprint(compiler)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "cann"
        for name in FOLDERS:
            (made / name).mkdir(parents=True)
        _build_all(compiler, Path(scratch), made / "lib64")
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster; what it built is the same.
            if not folder.is_dir():
                raise
    return folder


def fingerprint(compiler: str) -> str:
    """Differs when anything does that the libraries are made from."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True).stdout
    digest = hashlib.sha256(version)
    for wheel in WHEELS:
        digest.update(f"{wheel} {metadata.version(wheel)}".encode())
    for source in (Path(__file__), Path(symbols.__file__), *sorted(SOURCES.rglob("*.*"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _build_all(compiler: str, scratch: Path, folder: Path) -> None:
    objects = {library.name: _compile_library(compiler, library, scratch) for library in LIBRARIES}
    failing = scratch / "failing.cpp"
    failing.write_text(_failing_entries([each for some in objects.values() for each in some]))
    objects[RUNTIME.name].append(compile_source(compiler, failing, scratch / "failing.o"))
    for library in LIBRARIES:
        _link(compiler, library, objects[library.name], folder)


def _sources(library: Library) -> list[Path]:
    found = sorted(path for pattern in library.sources for path in SOURCES.glob(pattern))
    if library is RUNTIME:
        others = {path for other in LIBRARIES if other is not RUNTIME for path in _sources(other)}
        return [path for path in found if path not in others]
    return found


def _compile_library(compiler: str, library: Library, scratch: Path) -> list[Path]:
    return [
        compile_source(compiler, source, scratch / f"{library.name}-{source.stem}.o")
        for source in _sources(library)
    ]


def compile_source(compiler: str, source: Path, output: Path) -> Path:
    """Compile one source against CANN's headers; raises BuildError with the compiler's words."""
    _run(
        *(compiler, *FLAGS, "-isystem", str(symbols.headers()), "-I", str(SOURCES)),
        *("-c", str(source), "-o", str(output)),
    )
    return output


def _link(compiler: str, library: Library, objects: list[Path], folder: Path) -> None:
    soname = f"lib{library.name}.so"
    _run(
        *(compiler, "-shared", "-pthread", "-Wl,--no-undefined", "-Wl,--no-as-needed"),
        *(f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN", "-o", str(folder / soname)),
        *map(str, objects),
        *("-L", str(folder), *(f"-l{needed}" for needed in library.needs)),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\nfailed:\n{done.stderr}")


def _failing_entries(objects: list[Path]) -> str:
    """C++ for all that a wheel imports and no source defines: it fails and says its name."""
    defined = {name for file in objects for name in symbols.exported(file)}
    missing = sorted(set(symbols.imported_by_wheels()) - defined)
    mangled = [name for name in missing if name.startswith("_Z")]
    if mangled:
        raise BuildError(f"a wheel imports C++ functions that have to be written: {mangled}")
    declared = "\n".join(path.read_text() for path in symbols.headers().glob("acl/*.h"))
    lines = ['#include "report.h"', "namespace standin {", 'extern "C" {']
    for name in missing:
        if re.search(rf"\*\s*{name}\(", declared):
            body = f'void *{name}() {{ unimplemented("{name}"); return nullptr; }}'
        else:
            body = f'aclError {name}() {{ return unimplemented("{name}"); }}'
        lines.append(f"STANDIN_API {body}")
    return "\n".join([*lines, "}", "}", ""])


if __name__ == "__main__":
    try:
        print(os.fspath(build()))
    except (BuildError, ModuleNotFoundError) as error:
        sys.exit(f"error: {error}")
