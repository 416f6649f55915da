"""The house's rooms: who may import whom, and that the core needs nothing but Python."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "decoded"

# A room is a subpackage or a module of decoded; arrows point to the rooms it may import.
# A new room is added here, on purpose and as far down as it can go.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "wire": {"core"},
    "kv": {"wire"},
    "edges": {"core", "wire"},
    "path": {"core"},
    "receiver": {"core", "wire", "kv", "edges", "path"},
    "virtual": {"core", "kv", "edges", "path"},
    "observe": {"core", "wire", "edges"},
    "config": {"core", "wire", "kv", "edges"},
    "daemon": {"core", "wire", "kv", "edges", "path", "receiver", "virtual", "observe", "config"},
    "client": {"wire", "kv"},
    "producer": {"wire", "kv", "client"},
    "testing": {"wire", "kv", "client", "config"},
    "bench": {"core", "observe", "wire", "kv", "client", "producer", "testing", "config"},
    "vllm": {"wire", "kv", "client", "producer", "config"},
    "proxy": {"edges"},
    "doctor": {"wire", "kv", "edges", "config"},
    "cli": {
        *{"core", "wire", "kv", "edges", "observe", "config", "daemon"},
        *{"client", "producer", "testing", "bench", "proxy", "doctor"},
    },
    "demo": {"wire", "kv", "client", "producer", "testing", "config", "cli"},
    "cluster": {"cli"},
    "__main__": {"cli"},
}

# What else these rooms may use beside the standard library; the others are free to choose.
LIBRARIES: dict[str, set[str]] = {
    "core": set(),
    "wire": {"msgspec"},
    "client": {"msgspec", "zmq", "torch"},
}

# Heavy: imported inside functions only, so that nobody pays who does not use them.
LATE = {"torch", "torch_npu", "mooncake"}
# Programs of their own, which compute with tensors all along and nobody else imports.
COMPUTES = {"demo"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms() -> list[str]:
    found = {room_of(path) for path in PACKAGE.rglob("*.py")}
    return sorted(found - {"__init__"})


def imports(path: Path) -> Iterator[tuple[list[str], ast.stmt]]:
    """Each imported module's dotted name, in parts, with relative names resolved."""
    package = ["decoded", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split("."), node
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            if base == ["decoded"]:
                for alias in node.names:
                    yield [*base, alias.name], node
            else:
                yield base, node


def files(room: str) -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if room_of(path) == room]


def test_every_room_is_in_the_table() -> None:
    missing = set(rooms()) - ROOMS.keys()
    assert not missing, f"say in ROOMS what these may import: {sorted(missing)}"


def test_arrows_point_down_only() -> None:
    placed: set[str] = set()
    for room, below in ROOMS.items():
        assert below <= placed, f"{room} imports what comes after it: {sorted(below - placed)}"
        placed.add(room)


@pytest.mark.parametrize("room", rooms())
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    # `import decoded` and `from decoded import __version__` are no arrows: the package itself.
    allowed = ROOMS.get(room, set()) | {room, "__version__"}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {'.'.join(name)}"
        for path in files(room)
        for name, node in imports(path)
        if name[0] == "decoded" and name[1:] and name[1] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", LIBRARIES)
def test_a_light_room_uses_only_these_libraries(room: str) -> None:
    allowed = sys.stdlib_module_names | LIBRARIES[room] | {"decoded"}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} imports {'.'.join(name)}"
        for path in files(room)
        for name, node in imports(path)
        if name[0] not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", ["decoded.cli", "decoded.client", "decoded.daemon"])
def test_who_handles_no_tensors_does_not_pay_for_them(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert LATE.isdisjoint(result.stdout.split())


def test_heavy_libraries_are_imported_late() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {name} at once"
        for path in PACKAGE.rglob("*.py")
        for name, line in _imported_at_once(path)
        if name in LATE and room_of(path) not in COMPUTES
    ]
    assert not wrong, "\n".join(wrong)


def _imported_at_once(path: Path) -> Iterator[tuple[str, int]]:
    """Imports that run when the module is imported: none in functions or for type checkers."""
    pending: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno
        pending += ast.iter_child_nodes(node)


def test_the_core_runs_on_a_bare_python() -> None:
    """No site-packages at all: isolated, without `site`, with only this package on the path."""
    modules = [f"decoded.core.{path.stem}" for path in files("core") if path.stem != "__init__"]
    script = (
        "import importlib, sys\n"
        "root, *names = sys.argv[1:]\n"
        "sys.path.append(root)\n"
        "for name in names:\n"
        "    importlib.import_module(name)\n"
        "top = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(top - sys.stdlib_module_names - {'__main__', 'decoded'}))\n"
        "print(*sorted(n for n in sys.modules if n.startswith('decoded.')\n"
        "              and not n.startswith('decoded.core')))\n"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(PACKAGE.parent), *modules]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
