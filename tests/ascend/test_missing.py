"""What the stand-in does not do fails and says its name."""

from __future__ import annotations

import pytest

from .child import Child

API_NOT_SUPPORT = 200001  # ACL_ERROR_API_NOT_SUPPORT


@pytest.mark.parametrize(("operator", "kernel"), [("add", "Add"), ("matmul", "Dot")])
def test_an_operator_that_is_not_there_is_named(operator: str, kernel: str) -> None:
    with Child("use_operator", operator) as child:
        said = child.hear()
        assert f"OPS function error: {kernel}, error code is {API_NOT_SUPPORT}" in said
        assert "not implemented by the stand-in" in said
        assert child.wait() == 0


def test_an_imported_function_that_is_not_there_fails_and_is_named() -> None:
    with Child("calls.call_missing", "aclrtProcessReport") as child:
        assert child.hear() == API_NOT_SUPPORT
        assert child.wait() == 0
        assert "aclrtProcessReport: not implemented by the stand-in" in child.errors()
