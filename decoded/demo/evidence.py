"""What a run has brought to light, before anybody judges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .scenario import Request
from .shape import SHAPE, block_len

Fields = Mapping[str, Any]


@dataclass
class Evidence:
    """By external id, what each process told of a request.

    `outcomes`: every outcome that the engine was handed. `pushes`: how P's push ended.
    `cancelling`: the daemon's state of a request right after the cancel, P still pausing.
    `early`: requests whose outcome came while P was pausing. `tokens`, `reference`: D's,
    and those of the single-process run. `daemon`: the daemon's report of the request,
    story included. `touched`: blocks of nobody that were written to. `folder`: the
    KV that P and D have written down.
    """

    folder: Path
    outcomes: dict[str, list[Fields]] = field(default_factory=dict)
    pushes: dict[str, Fields] = field(default_factory=dict)
    cancelling: dict[str, list[str]] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    reference: dict[str, list[int]] = field(default_factory=dict)
    daemon: dict[str, Fields] = field(default_factory=dict)
    touched: list[int] | None = None
    exit_codes: dict[str, int | None] = field(default_factory=dict)

    def dump(self, request: Request, when: str) -> Dump | None:
        """KV of a request's blocks: `p` is P's, `before`, `after` and `end` are D's."""
        path = self.folder / f"{request.external_id}.{when}"
        return Dump(path.read_bytes(), request.blocks) if path.exists() else None


@dataclass(frozen=True)
class Dump:
    """Bytes of some blocks: by layer, then K and V, then by block."""

    content: bytes
    blocks: int

    def piece(self, layer: int, tensor: int, index: int) -> bytes:
        """The block at `index` of the request's list, in K (0) or V (1) of a layer."""
        size = block_len()
        begin = ((layer * 2 + tensor) * self.blocks + index) * size
        return self.content[begin : begin + size]


def differing(one: Dump, other: Dump, layers: range, blocks: range) -> list[str]:
    """Names of the blocks in which two dumps of a request differ, byte for byte."""
    return [
        f"block {index} of {'KV'[tensor]} in layer {layer}"
        for layer in layers
        for tensor in range(2)
        for index in blocks
        if one.piece(layer, tensor, index) != other.piece(layer, tensor, index)
    ]


ALL_LAYERS = range(SHAPE.layers)
