"""Mooncake writes from one piece of shared memory to another of this node:
`python -m decoded.doctor.mooncake_trial HOST PROTOCOL DEVICE`.

It prints one line of JSON, or fails with a line `error: why` on standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack

from decoded.kv.errors import RegionError
from decoded.kv.regions import SHARED_PREFIX, SharedRegion
from decoded.kv.transfer import TransferEngine, TransferError

from .trial import ERROR

SIZE = 8 << 20
_PATTERN = b"\x5a"


def write(host: str, protocol: str, device: str) -> float:
    """Seconds that 8 MiB took; every byte is compared. Raises RegionError or TransferError."""
    with ExitStack() as held:
        source = _region(held, "source")
        target = _region(held, "target")
        source.buffer[:] = _PATTERN * SIZE
        sender = held.enter_context(TransferEngine.open(host, protocol, device))
        receiver = held.enter_context(TransferEngine.open(host, protocol, device))
        sender.register(source.address, SIZE)
        receiver.register(target.address, SIZE)
        began = time.monotonic()
        sender.write(receiver.session, [source.address], [target.address], [SIZE])
        seconds = time.monotonic() - began
        if bytes(target.buffer) != _PATTERN * SIZE:
            raise TransferError("what arrived is not what was sent")
    return seconds


def _region(held: ExitStack, name: str) -> SharedRegion:
    region = SharedRegion.create(f"{SHARED_PREFIX}doctor-{os.getpid()}-{name}", SIZE)
    held.callback(region.close)
    held.callback(region.unlink)
    return region


def main(host: str, protocol: str, device: str = "") -> int:
    try:
        seconds = write(host, protocol, device)
    except (RegionError, TransferError, OSError, RuntimeError) as error:
        sys.stderr.write(f"{ERROR}{' '.join(str(error).split())}\n")
        return 1
    sys.stdout.write(json.dumps({"mib": SIZE >> 20, "seconds": seconds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
