from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from decoded.kv.regions import (
    RegionError,
    SharedRegion,
    check_name,
    stale_regions,
    tensor_view,
    unlink_stale,
)

from .conftest import MakeRegion
from .peer import Peer


def shm_file(region: SharedRegion) -> Path:
    return Path("/dev/shm") / region.name[1:]


def test_two_processes_see_the_same_bytes(make_region: MakeRegion, peer: Peer) -> None:
    region = make_region(10_000)
    assert bytes(region.buffer) == bytes(10_000)
    assert region.address == ctypes.addressof(ctypes.c_char.from_buffer(region.buffer))
    peer.ask("attach", region.name, 10_000)
    peer.ask("fill", 9_990, "from there")
    assert bytes(region.buffer[9_990:]) == b"from there"
    assert ctypes.string_at(region.address + 9_990, 10) == b"from there"


def test_every_page_is_reserved_and_only_for_this_user(make_region: MakeRegion) -> None:
    status = shm_file(make_region(1 << 20)).stat()
    assert status.st_blocks * 512 >= 1 << 20
    assert status.st_mode & 0o777 == 0o600


def test_a_region_that_does_not_fit_says_so_and_leaves_nothing(prefix: str) -> None:
    with pytest.raises(RegionError, match=r"needs 1125899906842624 bytes.*--shm-size"):
        SharedRegion.create(f"{prefix}huge", 1 << 50)
    assert not (Path("/dev/shm") / f"{prefix[1:]}huge").exists()


def test_a_taken_name_is_refused_and_left_alone(make_region: MakeRegion) -> None:
    region = make_region(100)
    region.buffer[:4] = b"mine"
    with pytest.raises(RegionError, match="exists already"):
        SharedRegion.create(region.name, 100)
    assert bytes(SharedRegion.attach(region.name, 100).buffer[:4]) == b"mine"


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_that_cannot_be(prefix: str, size: int) -> None:
    with pytest.raises(RegionError, match="cannot have"):
        SharedRegion.create(f"{prefix}x", size)
    with pytest.raises(RegionError, match="cannot have"):
        SharedRegion.attach(f"{prefix}x", size)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "x",
        "/a/b",
        "/../etc/passwd",
        "/..",
        "/.",
        "/a\0b",
        "/a b",
        "/ä",
        "/a\n",
        "/" + 300 * "x",
    ],
)
def test_names_that_cannot_be(name: str) -> None:
    for use in (check_name, stale_regions, lambda each: SharedRegion.attach(each, 1)):
        with pytest.raises(RegionError, match="cannot name shared memory"):
            use(name)


def test_attaching_what_is_not_there_or_too_small(make_region: MakeRegion, prefix: str) -> None:
    with pytest.raises(RegionError, match="there is no shared memory"):
        SharedRegion.attach(f"{prefix}none", 1)
    region = make_region(100)
    with pytest.raises(RegionError, match="has 100 bytes, 101 are needed"):
        SharedRegion.attach(region.name, 101)


def test_attaching_follows_no_link_and_opens_no_folder(prefix: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100))
    link = Path("/dev/shm") / f"{prefix[1:]}link"
    link.symlink_to(secret)
    try:
        with pytest.raises(RegionError, match="cannot be opened"):
            SharedRegion.attach(f"{prefix}link", 100)
    finally:
        link.unlink()


def test_closing_unmaps_and_again_is_harmless(make_region: MakeRegion) -> None:
    region = make_region(1 << 20)
    assert f"{region.address:x}-" in Path("/proc/self/maps").read_text()
    region.unlink()
    region.close()
    region.close()
    assert region.closed
    assert region.name not in Path("/proc/self/maps").read_text()
    with pytest.raises(RegionError, match="unlink it before"):
        region.unlink()


def test_a_region_in_use_stays_open_until_its_views_are_gone(make_region: MakeRegion) -> None:
    region = make_region(100)
    view = region.buffer[10:20]
    with pytest.raises(RegionError, match="still in use"):
        region.close()
    view[:2] = b"ok"
    assert bytes(region.buffer[10:12]) == b"ok"
    view.release()
    region.unlink()
    region.close()


def test_unlink_spares_a_newer_region_of_the_same_name(prefix: str) -> None:
    old = SharedRegion.create(f"{prefix}x", 100)
    assert old.unlink()
    assert not old.unlink()
    new = SharedRegion.create(f"{prefix}x", 100)
    assert not old.unlink()
    assert shm_file(new).exists()
    assert new.unlink()
    for region in (old, new):
        region.close()


def test_only_what_a_killed_process_left_is_stale(
    make_region: MakeRegion, prefix: str, peer: Peer
) -> None:
    mine = make_region(100)
    peer.ask("create", f"{prefix}theirs", 100)
    attached = SharedRegion.attach(f"{prefix}theirs", 100)
    assert stale_regions(prefix) == []
    assert unlink_stale(prefix) == []
    peer.kill()
    assert stale_regions(prefix) == [f"{prefix}theirs"]
    assert stale_regions(f"{prefix}other") == []
    assert unlink_stale(prefix) == [f"{prefix}theirs"]
    assert stale_regions(prefix) == []
    assert shm_file(mine).exists()
    attached.buffer[:2] = b"ok"  # its memory lives on where it is mapped
    attached.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
def test_tensors_are_views(make_region: MakeRegion, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    region = make_region(4096)
    tensor = tensor_view(region, 64, (2, 3, 4), dtype)
    assert tensor.shape == (2, 3, 4)
    assert tensor.dtype is getattr(torch, dtype)
    assert tensor.data_ptr() == region.address + 64
    tensor.copy_(torch.arange(24).view(2, 3, 4))
    again = tensor_view(region, 64, [24], getattr(torch, dtype))
    assert again.tolist() == list(range(24))
    with pytest.raises(RegionError, match="still in use"):
        region.close()
    del tensor, again
    region.unlink()
    region.close()


@pytest.mark.parametrize(
    ("offset", "shape", "dtype", "text"),
    [
        (0, (1025,), "float32", "bytes 0 to 4100 are not in"),
        (-4, (1,), "float32", "bytes -4 to 0 are not in"),
        (2, (1,), "float32", "offset 2 is no multiple of 4"),
        (0, (0,), "float32", "has no elements"),
        (0, (1,), "float99", "no dtype 'float99'"),
    ],
)
def test_tensors_that_cannot_be(
    make_region: MakeRegion, offset: int, shape: tuple[int, ...], dtype: str, text: str
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(RegionError, match=text):
        tensor_view(make_region(4096), offset, shape, dtype)


def test_regions_need_no_torch(prefix: str) -> None:
    code = (
        "import sys; from decoded.kv.regions import SharedRegion;"
        "region = SharedRegion.create(sys.argv[1], 10); region.unlink(); region.close();"
        "assert 'torch' not in sys.modules and 'multiprocessing' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, f"{prefix}x"], timeout=60, check=True)
    assert not os.path.exists(f"/dev/shm{prefix}x")
