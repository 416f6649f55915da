"""What hardware, or its driver, would not do is refused, by name."""

from __future__ import annotations

from .child import Child, run

# Of CANN's headers.
PARAM_INVALID = 107000
INVALID_DEVICE = 107001
INVALID_HANDLE = 107017
DELAY_S = 0.05


def test_misuse_is_refused_and_named() -> None:
    with Child("calls.mistakes") as child:
        said = child.hear()
        assert child.wait() == 0
        errors = child.errors()
    assert said == {
        "beyond the end": PARAM_INVALID,
        "wrong direction": PARAM_INVALID,
        "too little room": PARAM_INVALID,
        "free of a part": PARAM_INVALID,
        "no mistake": 0,
        "free": 0,
        "free again": PARAM_INVALID,
        "freed memory": PARAM_INVALID,
        "no such device": INVALID_DEVICE,
        "no such stream": INVALID_HANDLE,
    }
    for function in ("aclrtMemcpy", "aclrtFree", "aclrtSetDevice", "aclrtSynchronizeStream"):
        assert f"ascend stand-in: {function}" in errors


def test_memory_freed_before_its_stream_wrote_it_fails_the_stream() -> None:
    assert run("calls.free_too_early", delay_s=DELAY_S) == [0, 0, PARAM_INVALID]


def test_a_key_opens_memory_for_the_processes_that_were_named_until_it_is_freed() -> None:
    with Child("calls.export_listed") as owner, Child("calls.import_keys") as user:
        key, pid = owner.hear(), user.hear()
        assert user.ask(key) == PARAM_INVALID
        assert "did not list this process" in user.errors()
        assert owner.ask(pid) == 0
        assert user.ask(key) == 0
        assert owner.ask("free") == 0
        assert user.ask(key) == PARAM_INVALID
        assert user.ask("not a key") == PARAM_INVALID
