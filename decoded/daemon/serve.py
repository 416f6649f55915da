"""Starting the daemon, running it, and stopping it without losing a request."""

from __future__ import annotations

import asyncio
import os
import signal

import structlog
import uvloop
import zmq

from decoded import __version__
from decoded.config import (
    Config,
    endpoint_of,
    prepare_socket_dir,
    remove_socket,
    runtime_dir,
    transfer_environment,
)
from decoded.edges.descriptors import raise_descriptor_limit
from decoded.kv.regions import RegionError
from decoded.receiver.ports import PortError

from .daemon import Daemon
from .garbage import Collector
from .lock import EndpointLock, LockError, lock_path

log = structlog.get_logger(__name__)

EXIT_OK, EXIT_CANNOT_START = 0, 4


def serve(config: Config) -> int:
    """Run until SIGTERM or SIGINT; the exit code. What prevents a start is logged as one line."""
    environ = os.environ
    try:
        endpoint = endpoint_of(config, environ)
        prepare_socket_dir(endpoint, environ)
        lock = EndpointLock(endpoint, lock_path(endpoint, runtime_dir(environ)))
    except (LockError, OSError, ValueError) as error:
        log.error("cannot start", why=str(error))
        return EXIT_CANNOT_START
    try:
        raise_descriptor_limit()
        # Mooncake reads them when it is loaded.
        os.environ.update(transfer_environment(config, environ))
        return uvloop.run(_run(config, endpoint))
    finally:
        # ZMQ leaves it behind. While the lock is held it is nobody else's.
        remove_socket(endpoint)
        lock.release()


async def _run(config: Config, endpoint: str) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    daemon = Daemon(config, endpoint)
    try:
        try:
            await daemon.start()
        except (PortError, RegionError, zmq.ZMQError, OSError) as error:
            log.error("cannot start", why=str(error))
            return EXIT_CANNOT_START
        collector = Collector(lambda: daemon.in_flight)
        log.info(
            "ready",
            endpoint=daemon.endpoint,
            pid=os.getpid(),
            version=__version__,
            boot=daemon.boot,
        )
        await stop.wait()
        log.info("stopping", in_flight=daemon.in_flight, shutdown_s=config.deadlines.shutdown_s)
        await daemon.drain()
        collector.close()
    finally:
        await daemon.close()
    log.info("stopped")
    return EXIT_OK
