"""Running a proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import structlog
import uvloop
from aiohttp import web
from aiohttp.http import HttpProcessingError

from decoded.edges.descriptors import raise_descriptor_limit

from .app import Proxy
from .settings import Settings

log = structlog.get_logger(__name__)

EXIT_OK, EXIT_CANNOT_START = 0, 4
_HTTP_LOG = logging.getLogger("aiohttp.server")
CUT_OFF_S = 1.0
"""How long answers that are being written may take at the very end."""


def serve(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the exit code. What prevents a start is logged as one line."""
    raise_descriptor_limit()
    _HTTP_LOG.addFilter(_without_garbage)
    return uvloop.run(_run(settings))


async def _run(settings: Settings) -> int:
    stop, at_once = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    try:
        listener = _listen(settings)
    except OSError as error:
        where = f"{settings.host} port {settings.port}"
        log.error("cannot start", why=f"{where}: {error.strerror or error}; choose another --port")
        return EXIT_CANNOT_START
    host, port = listener.getsockname()[:2]
    own = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    metaserver = (settings.advertise_url or own).rstrip("/") + "/v1/metaserver"
    proxy = Proxy(settings, metaserver)
    runner = web.AppRunner(
        proxy.app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=CUT_OFF_S,
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=4096).start()
    log.info(
        "ready",
        url=own,
        pid=os.getpid(),
        decode=list(settings.decode),
        prefill=list(settings.prefill),
        virtual=settings.virtual,
        metaserver=metaserver,
    )
    await stop.wait()
    log.info("stopping", in_flight=proxy.legs_open, shutdown_s=settings.shutdown_s)
    # Until then it listens: requests in flight end only if D's daemons can still ask for prefills.
    drained = asyncio.create_task(proxy.drain(settings.shutdown_s))
    waited = asyncio.create_task(at_once.wait())
    await asyncio.wait([drained, waited], return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, waited):
        task.cancel()
    if proxy.legs_open:
        log.warning("requests are cut off", legs=proxy.legs_open)
    await runner.cleanup()
    await proxy.close()
    log.info("stopped")
    return EXIT_OK


def _without_garbage(record: logging.LogRecord) -> bool:
    """What a peer sends that is no HTTP is answered with 400: a line here, not a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.warning("no HTTP request", error=" ".join(error.message.split())[:200])
    return False


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError:
        listener.close()
        raise
    return listener
