"""POSIX shared memory that several processes map: the bytes behind a layout's regions.

A region is a file in /dev/shm, which is what shm_open opens on Linux. Its creator
holds a lock (flock) on it for as long as it has it mapped, and the kernel drops that
lock when the creator dies, however it dies. So a later start can tell what a dead
process left behind from what a live one uses.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import RegionError

if TYPE_CHECKING:
    import torch

__all__ = [
    "SHARED_PREFIX",
    "SHM",
    "RegionError",
    "SharedRegion",
    "adopt_region",
    "check_name",
    "stale_regions",
    "tensor_view",
    "unlink_stale",
]

SHM = Path("/dev/shm")
# Of every region that this package makes, in the daemon and in clients.
SHARED_PREFIX = "/decoded-"
_NAME = re.compile(r"/[A-Za-z0-9._-]{1,254}", re.ASCII)
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def check_name(name: str) -> str:
    """`name`, if it can name a region: a slash, then one path component. Else RegionError."""
    if not _NAME.fullmatch(name) or name in ("/.", "/.."):
        raise RegionError(
            f"{name[:300]!r} cannot name shared memory: it takes a slash and then 1 to 254 of "
            "A-Z a-z 0-9 . _ -"
        )
    return name


class SharedRegion:
    """A shared memory object, mapped into this process for reading and writing.

    Made by `create` or `attach`. `address` is where it lies in this process: what
    Mooncake registers. Closing unmaps it here; `unlink` removes the name. The
    memory is freed when the name is gone and the last process has unmapped it.
    """

    def __init__(self, name: str, size: int, fd: int) -> None:
        """Takes over `fd`, an open file of at least `size` bytes."""
        self.name = name
        self.size = size
        self._fd = fd
        try:
            self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise RegionError(f"shared memory {name} cannot be mapped: {error}") from error
        # The address stays valid until the map is closed; the ctypes object is not kept,
        # since it would count as a view and keep the map from closing.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.buffer = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size: int) -> SharedRegion:
        """Make and map a new region of `size` bytes, all zero, readable by this user only.

        Every page is reserved at once, so that no later access can find /dev/shm full.
        Raises RegionError when the name is taken, /dev/shm is too small, or the name
        or size cannot be.
        """
        check_name(name)
        if size < 1:
            raise RegionError(f"shared memory {name} cannot have {size} bytes")
        fd = _create(name)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            _remove(name, fd)
            os.close(fd)
            raise RegionError(_no_space(name, size, error)) from error
        except BaseException:
            _remove(name, fd)
            os.close(fd)
            raise
        return cls(name, size, fd)

    @classmethod
    def attach(cls, name: str, size: int) -> SharedRegion:
        """Map the first `size` bytes of a region that another process made.

        Raises RegionError when it is not there, smaller than that, or not shared memory.
        """
        check_name(name)
        if size < 1:
            raise RegionError(f"shared memory {name} cannot have {size} bytes")
        try:
            fd = os.open(_path(name), _OPEN)
        except FileNotFoundError:
            raise RegionError(
                f"there is no shared memory {name}: its owner has not made it, or has gone"
            ) from None
        except OSError as error:
            raise RegionError(f"shared memory {name} cannot be opened: {error}") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size < size:
            os.close(fd)
            raise RegionError(
                f"shared memory {name} has {status.st_size} bytes, {size} are needed: "
                "does the layout that names it belong to another run?"
            )
        return cls(name, size, fd)

    @property
    def closed(self) -> bool:
        return self._map.closed

    def close(self) -> None:
        """Unmap the region here; again is harmless.

        Whoever may still write through its address (a transfer engine that has it
        registered) must be closed before. Raises RegionError while tensors or
        memoryviews of it exist: the region stays as it is and can be closed later.
        """
        if self._map.closed:
            return
        try:
            self.buffer.release()
            self._map.close()
        except BufferError:
            self.buffer = memoryview(self._map)
            raise RegionError(
                f"shared memory {self.name} is still in use: drop the tensors and memoryviews "
                "made of it, then close it"
            ) from None
        os.close(self._fd)

    def unlink(self) -> bool:
        """Remove the name. False when it is gone already, or names a newer region by now."""
        if not self._map.closed:
            return _remove(self.name, self._fd)
        raise RegionError(f"shared memory {self.name} is closed: unlink it before that")

    def __repr__(self) -> str:
        return f"SharedRegion({self.name}, {self.size} bytes{', closed' if self.closed else ''})"


def tensor_view(
    region: SharedRegion, offset: int, shape: Sequence[int], dtype: torch.dtype | str
) -> torch.Tensor:
    """A tensor over the region's bytes from `offset` on; both see each other's writes.

    `dtype`: a torch dtype or its name ("bfloat16", "float16", "float32", "int8", ...).
    Imports torch. Raises RegionError for a range outside the region, an offset that
    is no multiple of the element size, or an unknown dtype.
    """
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise RegionError(f"torch has no dtype {dtype!r}")
    count = 1
    for extent in shape:
        count *= extent
    if any(extent < 1 for extent in shape):
        raise RegionError(f"a tensor of shape {tuple(shape)} has no elements")
    end = offset + count * found.itemsize
    if offset < 0 or end > region.size:
        raise RegionError(
            f"bytes {offset} to {end} are not in {region.name}, which has {region.size}"
        )
    if offset % found.itemsize:
        raise RegionError(f"offset {offset} is no multiple of {found.itemsize}, {found}'s size")
    # torch keeps the object that it is given, but not its buffer: a memoryview of its own
    # is what makes `close` see the tensor.
    return torch.frombuffer(region.buffer[offset:end], dtype=found).view(*shape)


def adopt_region(theirs: str, name: str) -> Callable[[], None]:
    """Give a region that another library made, `theirs`, a name of this package; returns what
    removes it again.

    So it is found and removed as stale like any other when this process dies, however it
    dies. The library's own name is left with nothing behind it, for the library to remove.
    Raises RegionError.
    """
    check_name(name)
    left = _path(f"{theirs}.left")
    try:
        fd = os.open(_path(check_name(theirs)), _OPEN)
    except OSError as error:
        raise RegionError(f"shared memory {theirs} cannot be opened: {error}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.link(_path(theirs), _path(name))
        left.touch(0o600, exist_ok=False)
        left.replace(_path(theirs))
    except OSError as error:
        _remove(name, fd)
        left.unlink(missing_ok=True)
        os.close(fd)
        raise RegionError(f"shared memory {theirs} cannot be named {name}: {error}") from error

    def remove() -> None:
        _remove(name, fd)
        os.close(fd)

    return remove


def stale_regions(prefix: str) -> list[str]:
    """Names that begin with `prefix` and whose creators are dead. Removes nothing."""
    return [name for name, _ in _stale(prefix)]


def unlink_stale(prefix: str) -> list[str]:
    """Remove the regions that dead processes left; returns their names.

    Only regions that were made by `create` and that this user may open count. One
    that another process still has attached keeps its memory until that process is gone.
    """
    return [name for name, fd in _stale(prefix) if _remove(name, fd)]


def _stale(prefix: str) -> Iterator[tuple[str, int]]:
    """Each stale region, locked while the caller looks at it."""
    check_name(prefix)
    for entry in sorted(SHM.glob(f"{prefix[1:]}*")):
        try:
            fd = os.open(entry, _OPEN)
        except OSError:
            continue  # gone by now, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield f"/{entry.name}", fd
        except BlockingIOError:
            continue  # its creator lives
        finally:
            os.close(fd)


def _create(name: str) -> int:
    """A new file, locked. Starts over if a clean-up removed it before it was locked."""
    while True:
        try:
            fd = os.open(_path(name), _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise RegionError(
                f"shared memory {name} exists already: another process uses the name, or a dead "
                f"one left it (then remove /dev/shm{name})"
            ) from None
        except OSError as error:
            raise RegionError(f"shared memory {name} cannot be made: {error}") from error
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _remove(name: str, fd: int) -> bool:
    """Remove `name` if it still names the open file `fd`."""
    path = _path(name)
    try:
        if not os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _path(name: str) -> Path:
    return SHM / name[1:]


def _no_space(name: str, size: int, error: OSError) -> str:
    if error.errno != errno.ENOSPC:
        return f"{size} bytes cannot be reserved for shared memory {name}: {error}"
    room = os.statvfs(SHM)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return (
        f"shared memory {name} needs {size} bytes, but /dev/shm has {free} free of {total}: make "
        "the KV memory smaller or /dev/shm larger (mount -o remount,size=...; docker --shm-size)"
    )
