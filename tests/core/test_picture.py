"""The picture of states in docs/architecture.md is drawn from the table, and fresh."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from decoded.core.states import TRANSITIONS

ROOT = Path(__file__).parents[2]


def draw_states(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "draw-states"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_picture_is_fresh() -> None:
    result = draw_states("--check")
    assert result.returncode == 0, result.stderr


def test_a_stale_picture_is_found_and_drawn_anew_and_the_rest_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Above.\n<!-- states: begin -->\nold\n<!-- states: end -->\nBelow.\n")
    stale = draw_states("--check", str(page))
    assert stale.returncode == 1
    assert "scripts/draw-states" in stale.stderr
    assert "old" in page.read_text(), "a check writes nothing"
    assert draw_states(str(page)).returncode == 0
    text = page.read_text()
    assert text.startswith("Above.\n")
    assert text.endswith("\nBelow.\n")
    assert "old" not in text
    for row in TRANSITIONS:
        assert f"| {row.source.value} | {row.trigger.value} | {row.target.value} |" in text
        assert f"    {row.source.value} --> {row.target.value} : " in text
    assert draw_states("--check", str(page)).returncode == 0


def test_a_page_without_the_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nothing to draw into.\n")
    result = draw_states(str(page))
    assert result.returncode == 2
    assert "states: begin" in result.stderr
    assert page.read_text() == "Nothing to draw into.\n"
