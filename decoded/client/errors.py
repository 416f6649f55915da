"""Everything that the client library raises."""

from __future__ import annotations


class ClientError(RuntimeError):
    """Base of all errors of the client library."""


class ClientClosed(ClientError):
    """The client was closed; open a new one."""


class ClientForked(ClientError):
    """The client was made by the parent process; its thread and socket stayed there."""


class ClientBroken(ClientError):
    """The client's I/O failed for a reason of its own; `__cause__` has it."""


class ClientOverloaded(ClientError):
    """More submissions wait for an outcome than `max_pending`; nothing was taken."""


class InvalidSubmission(ClientError, ValueError):
    """The submission does not fit the wire; nothing was sent."""


class DuplicateSubmission(ClientError, ValueError):
    """The same request id and attempt still wait for an outcome; nothing was sent."""


class NoAnswer(ClientError, TimeoutError):
    """The daemon did not answer in time."""


class DaemonError(ClientError):
    """The daemon said no. `code` is for machines, `about` the kind of message it answers."""

    def __init__(self, code: str, message: str, about: str = "") -> None:
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.about = about


class UnsupportedProtocol(DaemonError):
    """Client and daemon speak different versions of the engine link; upgrade the older one."""


class SeatTaken(DaemonError):
    """Another living client holds this engine's scheduler seat or worker rank."""


class WorldSizeMismatch(DaemonError):
    """The engine's clients disagree about its number of worker ranks."""


class RegistrationFailed(DaemonError):
    """The daemon cannot serve this rank's KV memory."""


class ProtocolFault(DaemonError):
    """One side sent what the other cannot read: a defect, or not a daemon at all."""


_BY_CODE: dict[str, type[DaemonError]] = {
    "unsupported_protocol": UnsupportedProtocol,
    "seat_taken": SeatTaken,
    "world_size_mismatch": WorldSizeMismatch,
    "malformed": ProtocolFault,
    "invalid": ProtocolFault,
    "unknown_kind": ProtocolFault,
}


def daemon_error(code: str, message: str, about: str = "") -> DaemonError:
    """The exception for an `error` message."""
    kind = _BY_CODE.get(code, DaemonError)
    if kind is DaemonError and about in ("register_kv", "unregister_kv"):
        kind = RegistrationFailed
    return kind(code, message, about)
