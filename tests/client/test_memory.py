"""KV memory that is shared: made here, moved there by torch, or the daemon's."""

from __future__ import annotations

import gc
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decoded.client.memory import (
    SharedCaches,
    give_up_shared,
    plan_layout,
    share_tensors,
    tensor_layout,
    tensor_storages,
)
from decoded.config.schema import PoolGroup, PoolLayer, PoolTensor
from decoded.kv.layout import LayoutError, check_layout
from decoded.kv.regions import RegionError, SharedRegion
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region

GROUPS = [KvGroup(16, 8), KvGroup(32, 4)]


@pytest.fixture
def layout() -> KvLayout:
    """Two layers in two groups, one with K and V, one with two kernel blocks per block."""
    return plan_layout(
        [PoolGroup(block_size=16, num_blocks=8), PoolGroup(block_size=32, num_blocks=4)],
        [
            PoolLayer(name="a", tensors=[PoolTensor(block_len=256), PoolTensor(block_len=128)]),
            PoolLayer(name="b", group=1, tensors=[PoolTensor(block_len=64, block_size_scale=2)]),
        ],
    )


@pytest.fixture
def caches(layout: KvLayout) -> Iterator[SharedCaches]:
    with SharedCaches.create(layout) as caches:
        yield caches


def test_tensors_and_blocks_are_the_same_bytes(caches: SharedCaches) -> None:
    key = caches.tensor("a", 0, torch.float32, (16, 4))
    assert key.shape == (8, 16, 4)
    key[3] = 1.5
    assert bytes(caches.block("a", 0, 3)) == struct.pack("f", 1.5) * 64
    assert bytes(caches.block("a", 0, 2)) == bytes(256)
    scaled = caches.tensor("b", 0, "int8")
    assert scaled.shape == (8, 64)
    scaled[6:8] = 7
    assert bytes(caches.block("b", 0, 3)) == bytes([7]) * 128
    del key, scaled


def test_another_process_sees_them(caches: SharedCaches) -> None:
    child = os.fork()
    if child == 0:
        try:
            other = SharedCaches.attach(caches.memory.layout)
            other.block("a", 1, 5)[:] = bytes([9]) * 128
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(caches.block("a", 1, 5)) == bytes([9]) * 128


def test_closing_removes_what_was_made_and_only_that(layout: KvLayout) -> None:
    path = Path("/dev/shm") / layout.regions[0].name[1:]
    with SharedCaches.create(layout) as made:
        with SharedCaches.attach(layout):
            assert path.exists()
        assert path.exists()
        tensor = made.tensor("a", 0, "int8")
        with pytest.raises(RegionError, match="still in use"):
            made.close()
        del tensor
    assert not path.exists()
    with pytest.raises(RegionError, match="there is no shared memory"):
        SharedCaches.attach(layout)


def test_a_half_made_set_of_regions_leaves_nothing(layout: KvLayout) -> None:
    taken = SharedRegion.create(f"{layout.regions[0].name}-taken", 64)
    try:
        names = [f"{layout.regions[0].name}-first", taken.name]
        tensors = [KvTensor(index, 0, 8) for index in range(2)]
        broken = KvLayout([Region(name, 64) for name in names], GROUPS, [KvLayer("a", 0, tensors)])
        with pytest.raises(RegionError, match="exists already"):
            SharedCaches.create(broken)
        assert not (Path("/dev/shm") / names[0][1:]).exists()
        assert (Path("/dev/shm") / names[1][1:]).exists()
    finally:
        taken.unlink()
        taken.close()


def test_wrong_names_and_shapes_are_explained(caches: SharedCaches) -> None:
    with pytest.raises(LayoutError, match="no layer 'c'"):
        caches.tensor("c", 0, "int8")
    with pytest.raises(LayoutError, match="2 tensors, no number 2"):
        caches.tensor("a", 2, "int8")
    with pytest.raises(LayoutError, match="256 bytes"):
        caches.tensor("a", 0, "float32", (16, 5))
    with pytest.raises(LayoutError, match="no dtype 'float33'"):
        caches.tensor("a", 0, "float33")
    with pytest.raises(LayoutError, match="0 to 7, not 8"):
        caches.block("a", 0, 8)


def test_torch_caches_are_moved_and_described() -> None:
    stacked = torch.arange(2 * 8 * 16 * 4, dtype=torch.float16).reshape(2, 8, 16, 4)
    latent = torch.zeros(8, 24, dtype=torch.bfloat16)
    content = stacked.clone()
    memory = share_tensors(
        {"a": (stacked[0], stacked[1]), "b": [latent]}, GROUPS, group_of={"b": 1}
    )
    layout = memory.layout
    check_layout(layout)
    assert [len(layer.tensors) for layer in layout.layers] == [2, 1]
    assert [tensor.block_len for tensor in layout.layers[0].tensors] == [128, 128]
    assert layout.layers[1].tensors[0].block_size_scale == 2
    assert torch.equal(stacked, content)
    # What another process maps is what the tensors show, and the other way around.
    with SharedCaches.attach(layout) as seen:
        shown = seen.tensor("a", 1, torch.float16, (16, 4))
        assert torch.equal(shown, stacked[1])
        shown[5] = 3.0
        assert stacked[1, 5].eq(3.0).all()
        latent[6:8] = 1.0
        assert seen.tensor("b", 0, torch.bfloat16)[6:8].eq(1.0).all()
        del shown
    # Asking again describes the same memory.
    assert share_tensors({"b": [latent]}, GROUPS[1:]).layout.regions == layout.regions[1:]


def test_moved_caches_leave_nothing_behind() -> None:
    moved = torch.ones(8, 24)
    [region] = share_tensors({"a": [moved]}, GROUPS[:1]).layout.regions
    assert region.name in _shared_names()
    del moved
    gc.collect()
    assert region.name not in _shared_names()


def test_who_is_about_to_end_leaves_no_name_behind() -> None:
    moved = torch.ones(8, 24)
    memory = share_tensors({"a": [moved]}, GROUPS[:1])
    [region] = memory.layout.regions
    with SharedCaches.attach(memory.layout) as seen:
        give_up_shared(memory)
        give_up_shared(memory)
        assert region.name not in _shared_names()
        moved[3] = 2.0
        assert bytes(seen.block("a", 0, 3)) == struct.pack("f", 2.0) * 24
    with pytest.raises(RegionError, match="given up: share newly allocated"):
        share_tensors({"a": [moved]}, GROUPS[:1])


@pytest.mark.parametrize("whole", [True, False])
def test_what_killed_processes_leave_is_removed(whole: bool) -> None:
    """Also where torch's own process is killed with them, as a container's are."""
    with subprocess.Popen(
        [sys.executable, "-c", _SHARES], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().strip()
        assert name in _shared_names()
        if whole:
            os.killpg(child.pid, signal.SIGKILL)
        else:
            child.kill()
    assert name in _shared_names()
    kept = torch.zeros(8, 24)
    share_tensors({"a": [kept]}, GROUPS[:1])
    assert name not in _shared_names()


_SHARES = """
import signal, torch
from decoded.client.memory import share_tensors
from decoded.wire.layout import KvGroup
cache = torch.ones(8, 24)
print(share_tensors({"a": [cache]}, [KvGroup(16, 8)]).layout.regions[0].name, flush=True)
signal.pause()
"""


def _shared_names() -> set[str]:
    return {f"/{path.name}" for path in Path("/dev/shm").iterdir()}


def test_caches_in_place_are_described_with_their_addresses() -> None:
    stacked, other = torch.zeros(2, 8, 32), torch.zeros(8, 10)
    caches = {"a": (stacked[0], stacked[1]), "b": (other,)}
    layout = tensor_layout(caches, GROUPS[:1])
    storages = list(tensor_storages(caches))
    assert [region.size for region in layout.regions] == [size for _, size in storages]
    for layer, tensors in zip(layout.layers, caches.values(), strict=True):
        for described, tensor in zip(layer.tensors, tensors, strict=True):
            address, _ = storages[described.region]
            assert address + described.offset == tensor.data_ptr()


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(9, 4), "9 kernel blocks, which is no multiple"),
        (torch.zeros(4, 8).T, "one piece"),
        (torch.zeros(8, 4, 4)[:, :, :2], "one piece"),
        (torch.zeros(16, 4)[::2], "one piece"),
        (torch.zeros(0, 4), "first extent"),
    ],
)
def test_caches_that_cannot_be_described(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        share_tensors({"a": [tensor]}, GROUPS)


def test_a_layer_s_group_must_exist_and_memory_must_be_cpu_s() -> None:
    with pytest.raises(LayoutError, match="KV group 2"):
        tensor_layout({"a": [torch.zeros(8, 4)]}, GROUPS, {"a": 2})
    with pytest.raises(RegionError, match="meta"):
        share_tensors({"a": [torch.zeros(8, 4, device="meta")]}, GROUPS)
