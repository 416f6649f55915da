"""One daemon per engine link: a lock that dies with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class LockError(Exception):
    """Another daemon serves this endpoint. The text names its process."""


def lock_path(endpoint: str, runtime_dir: Path) -> Path:
    """Beside an ipc endpoint's socket file; in the runtime folder for a TCP endpoint."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        return Path(f"{rest}.lock")
    if rest.endswith(":*"):  # a port of its own, whoever else asks for one
        rest = f"{rest[:-1]}any-{os.getpid()}"
    return runtime_dir / f"{scheme}-{rest.replace('/', '_').replace(':', '-')}.lock"


class EndpointLock:
    """Holds the lock file of an endpoint from construction to `release`.

    The lock is flock's: the kernel drops it when the process ends, however it ends, so
    a dead daemon's socket can be taken over and a live one's cannot.
    """

    def __init__(self, endpoint: str, path: Path) -> None:
        """Raises LockError if a live daemon holds it, OSError if the file cannot be made."""
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                raise LockError(
                    f"{endpoint} is served by the daemon with pid {holder or 'unknown'}: "
                    "stop it, or give this one another link.endpoint"
                ) from None
            # The holder before us may have removed the file between our open and our lock.
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(fd).st_ino == path.stat().st_ino:
                    break
            os.close(fd)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Remove the file and drop the lock."""
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
