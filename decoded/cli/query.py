"""Ask the running daemon one question, without a session."""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import Any

import zmq

from decoded.wire import link


class NoDaemonError(ConnectionError):
    """Nobody answers at the endpoint; the text says where, and what to do."""


def ask_status(
    endpoint: str,
    *,
    engine_id: str | None = None,
    request_id: str | None = None,
    limit: int = 100,
    timeout_s: float = 2.0,
) -> dict[str, Any]:
    """The daemon's answer to a status query. Raises NoDaemonError."""
    _check_socket_file(endpoint)
    token = secrets.randbits(48)
    query = link.StatusQuery(token=token, engine_id=engine_id, request_id=request_id, limit=limit)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.linger = 0
        dealer.maxmsgsize = link.MAX_FRAME_BYTES
        dealer.connect(endpoint)
        dealer.send(link.encode(query), zmq.NOBLOCK)
        return _await_report(dealer, endpoint, token, timeout_s)
    except zmq.ZMQError as error:
        raise NoDaemonError(f"cannot ask at {endpoint}: {error}") from error
    finally:
        dealer.close()
        context.term()


def _await_report(
    dealer: zmq.Socket[bytes], endpoint: str, token: int, timeout_s: float
) -> dict[str, Any]:
    ends = time.monotonic() + timeout_s
    while (left_s := ends - time.monotonic()) > 0 and dealer.poll(int(left_s * 1000) + 1):
        try:
            answer = link.decode_from_daemon(dealer.recv(zmq.NOBLOCK))
        except link.WireError as error:
            text = f"what answers at {endpoint} does not speak this version's protocol: {error}"
            raise NoDaemonError(text) from error
        if isinstance(answer, link.StatusReport) and answer.token == token:
            return answer.status
        if isinstance(answer, link.Error):
            raise NoDaemonError(f"the daemon at {endpoint} answers: {answer.message}")
    raise NoDaemonError(f"no daemon answers at {endpoint} within {timeout_s:g} s")


def _check_socket_file(endpoint: str) -> None:
    """Tell at once what ZMQ would keep trying: an ipc endpoint that nobody listens on."""
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc":
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except FileNotFoundError:
            reason = "there is no such socket; start `decoded serve`, or give --endpoint"
        except ConnectionRefusedError:
            reason = "the daemon that made the socket is gone; start `decoded serve`"
        except PermissionError:
            reason = f"user {os.geteuid()} may not connect to the socket"
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return
    raise NoDaemonError(f"no daemon at {endpoint}: {reason}")
