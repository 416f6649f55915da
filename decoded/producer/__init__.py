"""What a prefill (P) rank does in the deployed wire: handshake, layer writes, DONE or FAILED.

`Producer` is one P rank; `decoded.producer.metaserver` takes D's posts. Other modules of
this package are its parts.
"""

from .errors import HandshakeError, ParamsError, PlanError, ProducerError, PushError
from .params import RemoteAddress, RemoteParams, decode_params, read_address
from .producer import Producer, ProducerSettings
from .push import Push
from .request import PushRequest, PushResult

__all__ = [
    "HandshakeError",
    "ParamsError",
    "PlanError",
    "Producer",
    "ProducerError",
    "ProducerSettings",
    "Push",
    "PushError",
    "PushRequest",
    "PushResult",
    "RemoteAddress",
    "RemoteParams",
    "decode_params",
    "read_address",
]
