"""Byte strings that decoders must survive: noise, damaged frames, bombs."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import strategies as st

HEADS_WITH_LENGTH = (0xC6, 0xC9, 0xDB, 0xDD, 0xDF)  # bin32, ext32, str32, array32, map32
SHORT_HEADS = (0xC5, 0xC8, 0xDA, 0xDC, 0xDE)
HUGE = (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)

BOMBS: list[bytes] = [
    b"",
    b"\xc1",  # never used by msgpack
    *(struct.pack(">BI", head, size) + b"\x90" * 40 for head in HEADS_WITH_LENGTH for size in HUGE),
    *(struct.pack(">BH", head, 0xFFFF) + b"\xa0" * 40 for head in SHORT_HEADS),
    *(
        one * 60_000
        for one in (b"\x91", b"\x81\xa0", b"\x81", b"\xc7\x01", b"\xdd\x00\x00\x00\x01")
    ),
    b"\xdd" + struct.pack(">I", 60_000) + b"\x90" * 60_000,
    b"\xc7\x0c\xff" + b"\xff" * 12,  # a time far out of range
    b"\xd6\xff" + b"\xff" * 4,
    b"\x81\x90\x90",  # a map whose key cannot be hashed
    b"\x92\xc4\x0cget_meta_msg\xa2\xff\xfe",  # text that is not UTF-8
]


@st.composite
def damaged(draw: st.DrawFn, frames: st.SearchStrategy[bytes]) -> bytes:
    """A valid frame with a few bytes changed, cut out, put in, or its tail cut off."""
    frame: Any = bytearray(draw(frames))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(frame) - 1)))
        action = draw(st.sampled_from(["change", "remove", "insert", "cut", "head"]))
        if action == "change" and frame:
            frame[at] = draw(st.integers(0, 255))
        elif action == "remove" and frame:
            del frame[at : at + draw(st.integers(1, 8))]
        elif action == "insert":
            frame[at:at] = draw(st.binary(max_size=8))
        elif action == "cut":
            del frame[at:]
        else:
            head = draw(st.sampled_from(HEADS_WITH_LENGTH))
            frame[at:at] = struct.pack(">BI", head, draw(st.sampled_from(HUGE)))
    return bytes(frame)
