"""Reading the pages in docs/: their sections, tables, code and links."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
REQUIRED = "required"


def read(name: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def code(text: str, language: str) -> list[str]:
    """The contents of the fenced blocks of one language, in order."""
    return [body for found, body in _FENCE.findall(text) if found == language]


def examples(text: str) -> Iterator[tuple[bytes, Any]]:
    """Each `hex` block with what the `json` block right after it says that it means."""
    blocks = _FENCE.findall(text)
    for (language, body), (after, meaning) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language == "hex":
            assert after == "json", f"no json follows the example {body[:40]}"
            yield bytes.fromhex(body), json.loads(meaning)


def section(text: str, title: str) -> str:
    """What stands below the heading `title`, up to the next heading of any level."""
    prose = _FENCE.sub(lambda fence: "\n" * fence.group(0).count("\n"), text)
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", prose, re.MULTILINE | re.DOTALL)
    assert found, f"there is no heading '{title}'"
    return found.group(1)


def names(text: str) -> set[str]:
    """Everything that stands in backquotes."""
    return set(_SPAN.findall(_FENCE.sub("", text)))


def rows(text: str) -> dict[str, list[str]]:
    """The table rows whose first cell is a name in backquotes: that name to the other cells."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        name = re.fullmatch(r"`([^`]+)`", cells[0])
        if line.startswith("| ") and name:
            assert name.group(1) not in found, f"two rows for {name.group(1)}"
            found[name.group(1)] = cells[1:]
    return found


def struct_rows(struct: type[msgspec.Struct]) -> dict[str, list[str]]:
    """What a table has to say of a struct: each key with its type and its default."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: [type_text(field.type), _default(field)] for field in info.fields}


def type_text(kind: inspect.Type) -> str:
    """A type and its bounds, as the pages write them."""
    if isinstance(kind, inspect.UnionType):
        return " or ".join(type_text(each) for each in kind.types)
    if isinstance(kind, inspect.IntType):
        return f"int {_range(kind)}".strip()
    if isinstance(kind, inspect.FloatType):
        return f"float {_range(kind)}".strip()
    if isinstance(kind, inspect.StrType):
        return f"str {_length(kind)}".strip()
    if isinstance(kind, inspect.BytesType):
        return f"bin (at most {kind.max_length})"
    if isinstance(kind, inspect.ListType):
        return f"list {_length(kind)}".strip() + f" of {type_text(kind.item_type)}"
    if isinstance(kind, inspect.LiteralType):
        return " or ".join(f'"{each}"' for each in kind.values)
    if isinstance(kind, inspect.StructType):
        return kind.cls.__name__
    return _PLAIN[type(kind)]


_PLAIN: dict[type[inspect.Type], str] = {
    inspect.BoolType: "bool",
    inspect.NoneType: "nil",
    inspect.DictType: "map",
}


def _default(field: inspect.Field) -> str:
    return REQUIRED if field.required else json.dumps(field.default).replace("null", "nil")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low = "" if kind.ge is None else _number(kind.ge)
    if kind.gt is not None:
        low = f"above {_number(kind.gt)}"
    high = None if kind.le is None else kind.le
    if kind.lt is not None and isinstance(kind, inspect.IntType):
        high = kind.lt - 1
    if high is not None:
        return f"{low} to {_number(high)}"
    return f"from {low}" if low else ""


def _length(kind: inspect.StrType | inspect.ListType) -> str:
    low, high = kind.min_length, kind.max_length
    return f"({low or 0} to {high})" if high is not None else ""


def _number(number: float) -> str:
    """Powers of two are easier to check as such."""
    for less in (0, 1):
        whole = int(number) + less
        if whole > 1_000_000 and whole & (whole - 1) == 0:
            return f"2^{whole.bit_length() - 1}" + " - 1" * less
    return str(int(number)) if number < 1e6 else f"{number:g}".replace("e+0", "e")
