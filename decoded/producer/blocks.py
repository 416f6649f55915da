"""Which blocks of P a push reads, and where they lie."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import Run, kernel_runs

_RUNS_KEPT = 16


class LocalBlocks:
    """A request's blocks of P, per KV group; a queued write keeps those it was queued with.

    `ids` grows in the caller's thread; `kernel_runs` is for the push thread.
    """

    def __init__(self, ids: Sequence[Sequence[int]]) -> None:
        self.ids = [list(group) for group in ids]
        self._runs: dict[tuple[int, range, int, int], list[Run]] = {}

    def extend(self, more: Sequence[Sequence[int]]) -> None:
        """Blocks for tokens to come."""
        for mine, new in zip(self.ids, more, strict=True):
            mine.extend(new)

    def kernel_runs(
        self,
        group: int,
        remote_block_ids: Sequence[Sequence[int]],
        blocks: range,
        scale: int,
        remote_scale: int,
    ) -> list[Run]:
        """The runs of these blocks of a group; its layers share them."""
        key = group, blocks, scale, remote_scale
        runs = self._runs.get(key)
        if runs is None:
            if len(self._runs) >= _RUNS_KEPT:
                self._runs.clear()
            remote = remote_block_ids[group]
            runs = kernel_runs(self.ids[group], remote, blocks, scale, remote_scale)
            self._runs[key] = runs
        return runs
