"""What the pages name is there: files, headings, rooms, counters, keys of the configuration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from decoded.config import Config
from tests.core.test_rooms import ROOMS, rooms

from . import pages

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in (pages.ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w./-]+\.(?:py|yaml|md|json|toml|txt)|(?:scripts|configs|docs|tests)/[\w./-]+")


def anchors(name: str) -> set[str]:
    """The headings of a page, as GitHub turns them into anchors."""
    prose = re.sub(r"^```.*?^```$", "", pages.read(name), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    for link in LINK.findall(pages.read(name)):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        page = (pages.ROOT / name).parent / target if target else pages.ROOT / name
        assert page.exists(), f"{name} links to {link}"
        if anchor:
            assert anchor in anchors(str(page.resolve().relative_to(pages.ROOT))), link


@pytest.mark.parametrize("name", [p for p in PAGES if p != "CHANGELOG.md"])
def test_files_that_a_page_names_exist(name: str) -> None:
    package = pages.ROOT / "decoded"
    for span in sorted(pages.names(pages.read(name))):
        if not FILE.fullmatch(span):
            continue
        places = [pages.ROOT / span, package / span, pages.ROOT / "docs" / span]
        found = any(place.exists() for place in places) or list(package.glob(f"*/{span}"))
        assert found, f"{name} names {span}"


def test_rooms_are_those_that_the_code_keeps() -> None:
    there = set(rooms()) - {"__main__"}
    described = pages.rows(pages.section(pages.read("docs/architecture.md"), "Rooms"))
    assert described.keys() == there
    for room, (_, may_import) in described.items():
        assert pages.names(may_import) == ROOMS[room] & there, room


def counters() -> Iterator[str]:
    """Every name that the package counts under; what is filled in shows as `*`."""
    for path in (pages.ROOT / "decoded").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Subscript):
                continue
            owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if owner.lstrip("_") != "counters":
                continue
            if isinstance(node.slice, ast.Constant):
                yield str(node.slice.value)
            elif isinstance(node.slice, ast.JoinedStr):
                parts = node.slice.values
                yield "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in parts)


def test_every_counter_is_explained() -> None:
    described = pages.names(pages.section(pages.read("docs/operations.md"), "Counters"))
    found = set(counters())
    assert len(found) > 15
    assert found <= described, sorted(found - described)


def keys_of_configuration() -> set[str]:
    return {
        f"{section}.{key}"
        for section, info in Config.model_fields.items()
        for key in info.annotation.model_fields  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("name", PAGES)
def test_keys_of_the_configuration_are_spelled_right(name: str) -> None:
    known = keys_of_configuration()
    sections = {key.partition(".")[0] for key in known}
    for span in pages.names(pages.read(name)):
        path = re.match(r"(\w+)\.(\w+)", span)
        if path and path.group(1) in sections and not FILE.fullmatch(span):
            assert path.group(0) in known, f"{name} names {span}"
