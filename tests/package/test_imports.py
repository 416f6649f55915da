"""What importing costs: heavy packages come in where they are used, and not before."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "decoded"

# Code to run, and what must not have been imported by then.
COSTS = {
    "a client": (
        "import decoded.client",
        ("torch", "mooncake", "aiohttp", "pydantic", "structlog"),
    ),
    "the daemon": ("import decoded.daemon", ("torch", "mooncake")),
    "the producer": ("import decoded.producer", ("torch", "mooncake")),
    "configuration": ("import decoded.config", ("torch", "mooncake", "aiohttp", "zmq")),
    "help": (
        "from decoded.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        ("torch", "mooncake", "aiohttp", "pydantic", "zmq", "rich", "structlog", "asyncio"),
    ),
    "version": (
        "from decoded.cli import main\nmain(['version'])",
        ("torch", "mooncake", "aiohttp", "pydantic", "zmq"),
    ),
    "check-config": (
        "from decoded.cli import main\nmain(['check-config'])",
        ("torch", "mooncake", "aiohttp", "zmq"),
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_what_is_not_imported(name: str) -> None:
    code, unwanted = COSTS[name]
    report = f"{code}\nimport sys\nprint('\\nhas:', *sorted(set(sys.modules) & {set(unwanted)}))"
    said = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout.splitlines()[-1] == "has:", said.stdout


@pytest.mark.parametrize("room", ["core", "wire", "client"])
def test_what_a_room_may_import(room: str) -> None:
    """Arrows point down: the core needs the standard library, the wire msgspec, clients zmq."""
    allowed = {
        "core": {"core"},
        "wire": {"core", "wire", "msgspec"},
        "client": {"wire", "client", "kv", "msgspec", "zmq", "torch"},
    }[room]
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name in _imports(path):
            top, _, rest = name.partition(".")
            needed = rest.partition(".")[0] if top == "decoded" else top
            assert needed in allowed or needed in sys.stdlib_module_names or not needed, (
                f"{path.relative_to(PACKAGE)} imports {name}"
            )


def _imports(path: Path) -> list[str]:
    """The absolute names of all that a module imports, late imports included."""
    package = ("decoded", *path.relative_to(PACKAGE).parent.parts)
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            # `from decoded import wire` and `from . import x` name modules too.
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names
