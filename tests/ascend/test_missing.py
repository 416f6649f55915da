"""What the stand-in does not do fails and says its name."""

from __future__ import annotations

from .child import Child

API_NOT_SUPPORT = 200001  # ACL_ERROR_API_NOT_SUPPORT


def test_an_operator_that_is_not_there_is_named() -> None:
    with Child("add") as child:
        assert "aclnnAdd" in child.hear()
        assert child.wait() == 0


def test_an_imported_function_that_is_not_there_fails_and_is_named() -> None:
    with Child("call_missing", "aclrtProcessReport") as child:
        assert child.hear() == API_NOT_SUPPORT
        assert child.wait() == 0
        assert "aclrtProcessReport: not implemented by the stand-in" in child.errors()
