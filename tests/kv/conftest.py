import os
import secrets
from collections.abc import Callable, Iterator

import pytest

from decoded.kv.regions import SharedRegion, unlink_stale

from .peer import Peer

MakeRegion = Callable[[int], SharedRegion]


@pytest.fixture
def prefix() -> Iterator[str]:
    """Names of this test's regions begin with it; whatever is left is removed."""
    prefix = f"/decoded-test-{os.getpid()}-{secrets.token_hex(4)}-"
    yield prefix
    unlink_stale(prefix)


@pytest.fixture
def make_region(prefix: str) -> Iterator[MakeRegion]:
    made: list[SharedRegion] = []

    def make(size: int) -> SharedRegion:
        made.append(SharedRegion.create(f"{prefix}{len(made)}", size))
        return made[-1]

    yield make
    for region in made:
        if not region.closed:
            region.unlink()
            region.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer
