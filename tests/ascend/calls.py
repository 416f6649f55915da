"""Programs that call CANN's functions themselves: `python -m tests.ascend.calls NAME [...]`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

from .voice import heard, say

TO_DEVICE, TO_HOST = 1, 2  # aclrtMemcpyKind
KEY_SIZE = 65
SIZE = 4096

acl = ctypes.CDLL("libascendcl.so")
Pointer, Size = ctypes.c_void_p, ctypes.c_size_t
acl.aclrtMalloc.argtypes = [ctypes.POINTER(Pointer), Size, ctypes.c_int]
acl.aclrtFree.argtypes = [Pointer]
acl.aclrtMemcpy.argtypes = [Pointer, Size, Pointer, Size, ctypes.c_int]
acl.aclrtMemcpyAsync.argtypes = [*acl.aclrtMemcpy.argtypes, Pointer]
acl.aclrtSynchronizeStream.argtypes = [Pointer]
acl.aclrtIpcMemGetExportKey.argtypes = [Pointer, Size, Pointer, Size, ctypes.c_uint64]
acl.aclrtIpcMemImportByKey.argtypes = [ctypes.POINTER(Pointer), ctypes.c_char_p, ctypes.c_uint64]
acl.aclrtIpcMemSetImportPid.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_int32), Size]


def _malloc() -> int:
    assert acl.aclrtSetDevice(0) == 0
    pointer = Pointer()
    assert acl.aclrtMalloc(ctypes.byref(pointer), SIZE, 0) == 0
    assert pointer.value is not None
    return pointer.value


def call_missing(name: str) -> None:
    """Call a function that the wheels import and the stand-in does not implement."""
    say(getattr(acl, name)())


def mistakes() -> None:
    """Misuse memory, streams and devices; say what each call returned."""
    memory = _malloc()
    host = ctypes.create_string_buffer(2 * SIZE)
    at = ctypes.addressof(host)
    said = {
        "beyond the end": acl.aclrtMemcpy(memory, 2 * SIZE, at, 2 * SIZE, TO_DEVICE),
        "wrong direction": acl.aclrtMemcpy(memory, SIZE, at, SIZE, TO_HOST),
        "too little room": acl.aclrtMemcpy(memory, 8, at, SIZE, TO_DEVICE),
        "free of a part": acl.aclrtFree(memory + 64),
        "no mistake": acl.aclrtMemcpy(memory, SIZE, at, SIZE, TO_DEVICE),
        "free": acl.aclrtFree(memory),
        "free again": acl.aclrtFree(memory),
        "freed memory": acl.aclrtMemcpy(memory, SIZE, at, SIZE, TO_DEVICE),
        "no such device": acl.aclrtSetDevice(7),
        "no such stream": acl.aclrtSynchronizeStream(0x1234),
    }
    say(said)


def free_too_early() -> None:
    """Free memory that a stream has yet to write."""
    memory = _malloc()
    host = ctypes.create_string_buffer(SIZE)
    queued = acl.aclrtMemcpyAsync(memory, SIZE, ctypes.addressof(host), SIZE, TO_DEVICE, None)
    freed = acl.aclrtFree(memory)
    say([queued, freed, acl.aclrtSynchronizeStream(None)])


def export_listed() -> None:
    """Export memory to those processes only that the test names; free it at its word."""
    memory = _malloc()
    key = ctypes.create_string_buffer(KEY_SIZE)
    assert acl.aclrtIpcMemGetExportKey(memory, SIZE, ctypes.addressof(key), KEY_SIZE, 0) == 0
    say(key.value.decode())
    while (order := heard()) != "end":
        if order == "free":
            say(acl.aclrtFree(memory))
        else:
            say(acl.aclrtIpcMemSetImportPid(key.value, (ctypes.c_int32 * 1)(order), 1))


def import_keys() -> None:
    """Try the keys that the test says."""
    assert acl.aclrtSetDevice(0) == 0
    say(os.getpid())
    while (key := heard()) != "end":
        pointer = Pointer()
        code = acl.aclrtIpcMemImportByKey(ctypes.byref(pointer), key.encode(), 0)
        if code == 0:
            assert acl.aclrtIpcMemClose(key.encode()) == 0
        say(code)


PROGRAMS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (call_missing, export_listed, free_too_early, import_keys, mistakes)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
