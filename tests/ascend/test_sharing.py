"""Memory of one process in another."""

from __future__ import annotations

import pytest

from .child import Child

SEGMENTS = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("variables", [{}, SEGMENTS], ids=["whole", "expandable"])
def test_both_sides_see_what_the_other_writes(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with Child("share") as owner, Child("use_shared") as user:
        assert user.ask(owner.hear()) == "open"
        assert user.ask("read") == [5] * 8
        assert user.ask(77) == "written"
        assert owner.ask("read") == [5, 5, 77, 77, 5, 5, 5, 5]
        assert owner.ask(6) == "written"
        assert user.ask("read") == [6] * 8


def test_what_an_ended_process_shared_is_not_there() -> None:
    with Child("share") as owner, Child("use_shared") as user:
        shared = owner.hear()
        owner.tell("end")
        owner.wait()
        user.tell(shared)
        assert user.wait() != 0
        assert "aclrtIpcMemImportByKey" in user.errors()
