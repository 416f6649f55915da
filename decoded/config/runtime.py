"""The runtime folder: where the engine link's socket lies unless the configuration says."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from .endpoint import check_endpoint
from .schema import Config

SOCKET_NAME = "decoded.sock"


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """systemd's RUNTIME_DIRECTORY; /run/decoded for root; else one that belongs to the user."""
    given = environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if os.geteuid() == 0:
        return Path("/run/decoded")
    session = environ.get("XDG_RUNTIME_DIR", "")
    if session.startswith("/"):
        return Path(session) / "decoded"
    return Path(f"/tmp/decoded-{os.geteuid()}")


def endpoint_of(config: Config, environ: Mapping[str, str]) -> str:
    """The engine link's endpoint. Raises ValueError if the default one is not possible."""
    if config.link.endpoint is not None:
        return config.link.endpoint
    endpoint = f"ipc://{runtime_dir(environ) / SOCKET_NAME}"
    try:
        return check_endpoint(endpoint)
    except ValueError as error:
        raise ValueError(f"{error}; set link.endpoint") from None


def prepare_socket_dir(endpoint: str, environ: Mapping[str, str]) -> None:
    """Make the folder that an ipc endpoint's socket file goes into, as the daemon does at start.

    Only the runtime folder is made (mode 0700); any other has to be there. Raises
    OSError with a text that says what to do.
    """
    scheme, _, rest = endpoint.partition("://")
    if scheme != "ipc":
        return
    folder = Path(rest).parent
    if folder != runtime_dir(environ):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: make it, or set link.endpoint")
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        text = f"cannot make the runtime folder {folder}: {error.strerror}; or set link.endpoint"
        raise type(error)(text) from error
    # In a folder that others can write to, anybody may have been here first.
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder: remove it, or set link.endpoint")
    if status.st_uid != os.geteuid():
        owner = status.st_uid
        raise PermissionError(f"{folder} belongs to user {owner}: remove it, or set link.endpoint")
    if status.st_mode & 0o022:
        raise PermissionError(f"{folder} can be written to by others: chmod 700 {folder}")


def remove_socket(endpoint: str) -> None:
    """Remove the socket file of an ipc endpoint, if it is there."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        Path(rest).unlink(missing_ok=True)
