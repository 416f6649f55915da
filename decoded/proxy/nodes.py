"""The engines behind the proxy, and which of them is next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from .errors import NoNode

AVOID_S = 5.0
"""How long a node that could not be reached is asked last."""


class Node:
    """One engine. `load`: estimated tokens of what it was given; `legs`: how many those are."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.load = 0
        self.legs = 0
        self._avoid_until = 0.0

    @property
    def avoided(self) -> bool:
        """It could not be reached a moment ago."""
        return time.monotonic() < self._avoid_until

    def unreachable(self) -> None:
        """It could not be reached."""
        self._avoid_until = time.monotonic() + AVOID_S

    @contextmanager
    def busy(self, cost: int) -> Iterator[None]:
        """It has this much more to do meanwhile."""
        self.load += cost
        self.legs += 1
        try:
            yield
        finally:
            self.load -= cost
            self.legs -= 1


class Nodes:
    """All engines of one side."""

    def __init__(self, side: str, urls: Sequence[str]) -> None:
        self.side = side
        self._nodes = [Node(url) for url in urls]
        self._turn = itertools.count()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def choose(self, tried: Collection[Node] = ()) -> Node:
        """The one with the least to do, by turns where that is equal; unreachable ones last.

        Raises NoNode if all have been tried.
        """
        # Each turn begins one node further on; `min` takes the first of equals.
        first = next(self._turn) % max(1, len(self._nodes))
        order = self._nodes[first:] + self._nodes[:first]
        left = [node for node in order if node not in tried]
        if not left:
            known = f"{len(self._nodes)} {self.side} node{'s' * (len(self._nodes) != 1)}"
            raise NoNode(f"none of {known} could be reached")
        return min(left, key=lambda node: (node.avoided, node.load, node.legs))
