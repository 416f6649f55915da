"""What an engine links against: small, and without torch or Mooncake.

`Client` is for a worker loop, `AsyncClient` for asyncio. `decoded.client.memory` and
`decoded.client.transfer` help with KV memory and are imported by name.
"""

from decoded.wire.link import Submission

from .aio import AsyncClient
from .errors import (
    ClientBroken,
    ClientClosed,
    ClientError,
    ClientForked,
    ClientOverloaded,
    DaemonError,
    DuplicateSubmission,
    InvalidSubmission,
    NoAnswer,
    ProtocolFault,
    RegistrationFailed,
    SeatTaken,
    UnsupportedProtocol,
    WorldSizeMismatch,
)
from .outcomes import Outcome
from .pacing import Limits
from .registration import Registration
from .sync import Client

__all__ = [
    "AsyncClient",
    "Client",
    "ClientBroken",
    "ClientClosed",
    "ClientError",
    "ClientForked",
    "ClientOverloaded",
    "DaemonError",
    "DuplicateSubmission",
    "InvalidSubmission",
    "Limits",
    "NoAnswer",
    "Outcome",
    "ProtocolFault",
    "Registration",
    "RegistrationFailed",
    "SeatTaken",
    "Submission",
    "UnsupportedProtocol",
    "WorldSizeMismatch",
]
