"""Hypothesis strategies made from the message types themselves, so that none is forgotten."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def messages(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Valid instances of a Struct type, limits included."""
    info = mi.type_info(kind)
    assert isinstance(info, mi.StructType)
    return st.builds(kind, **{field.name: _strategy(field.type) for field in info.fields})


def _strategy(info: mi.Type) -> st.SearchStrategy[Any]:
    if isinstance(info, mi.StructType):
        return messages(info.cls)
    if isinstance(info, mi.UnionType):
        return st.one_of([_strategy(item) for item in info.types])
    if isinstance(info, mi.ListType):
        least = info.min_length or 0
        most = info.max_length if info.max_length is not None else least + 3
        return st.lists(_strategy(info.item_type), min_size=least, max_size=min(most, least + 3))
    if isinstance(info, mi.DictType):
        return st.dictionaries(_strategy(info.key_type), _strategy(info.value_type), max_size=3)
    if isinstance(info, mi.IntType):
        least = info.ge if info.ge is not None else (info.gt or -(2**63) - 1) + 1
        most = info.le if info.le is not None else (info.lt or 2**64) - 1
        return st.integers(int(least), int(most))
    if isinstance(info, mi.StrType):
        least, most = info.min_length or 0, info.max_length or 24
        return st.text(min_size=least, max_size=min(most, 24)) | st.just("x" * most)
    if isinstance(info, mi.BytesType):
        return st.binary(max_size=24) | st.just(b"x" * (info.max_length or 24))
    if isinstance(info, mi.FloatType):
        lowest = info.gt if info.gt is not None else -1e12
        return st.floats(lowest, info.le or 1e12, exclude_min=info.gt is not None)
    if isinstance(info, mi.LiteralType):
        return st.sampled_from(info.values)
    if isinstance(info, mi.BoolType):
        return st.booleans()
    if isinstance(info, mi.NoneType):
        return st.none()
    if isinstance(info, mi.AnyType):
        return JSON
    raise NotImplementedError(f"no strategy for {info}")
