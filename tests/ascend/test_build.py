"""The libraries are built once for the same sources, wheels and compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import build


def test_what_is_there_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = build.build()

    def compile_nothing(*_: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(build, "_run", compile_nothing)
    assert build.build() == there


def test_a_changed_source_is_built_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = build.fingerprint("g++")
    for source in build.SOURCES.glob("*.cpp"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    copied = build.fingerprint("g++")
    (tmp_path / "stream.cpp").write_text("// changed\n")
    assert len({before, copied, build.fingerprint("g++")}) == 3


def test_a_prototype_that_is_not_canns_does_not_compile(tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text('#include <acl/acl.h>\nextern "C" void aclrtSetDevice(int32_t) {}\n')
    with pytest.raises(build.BuildError, match=r"error: .*aclrtSetDevice"):
        build.compile_source("g++", source, tmp_path / "wrong.o")
