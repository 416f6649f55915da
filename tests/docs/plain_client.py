"""A client of the engine link, and a P node, that know docs/protocol.md and nothing else.

On purpose without anything of `decoded`: ZeroMQ, msgpack maps and HTTP.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import msgspec
import zmq

TIMEOUT_MS = 10_000


class PlainClient:
    """One client at one seat."""

    def __init__(self, endpoint: str, engine_id: str, role: str) -> None:
        self._hello = {
            "protocol": 1,
            "engine_id": engine_id,
            "session": secrets.token_hex(8),
            "role": role,
        }
        self._endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._log, self._seen = "", 0
        self.welcome: dict[str, Any] = {}
        self.reconnect()

    def reconnect(self) -> None:
        """A new DEALER, hello, welcome; then acknowledge what is known of the same log."""
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self._endpoint)
        self.send("hello", **self._hello)
        self.welcome = self.expect("welcome")
        if self.welcome["log"] == self._log:
            self.send("acknowledge", log=self._log, seq=self._seen)
        else:
            self._log, self._seen = self.welcome["log"], 0

    def send(self, kind: str, **keys: Any) -> None:
        assert self._socket is not None
        self._socket.send(msgspec.msgpack.encode({"kind": kind, **keys}))

    def expect(self, kind: str) -> dict[str, Any]:
        """The next message of a kind; heartbeats are passed over."""
        assert self._socket is not None
        while True:
            assert self._socket.poll(TIMEOUT_MS), f"no {kind} from the daemon"
            message: dict[str, Any] = msgspec.msgpack.decode(self._socket.recv())
            if message["kind"] != "heartbeat":
                assert message["kind"] == kind, message
                return message

    def submit(
        self,
        request_id: str,
        external_id: str,
        block_ids: list[list[int]],
        prompt_tokens: int,
        metaserver: str = "",
        **keys: Any,
    ) -> None:
        if metaserver:
            keys["kv_transfer_params"] = {"metaserver": metaserver}
        request = {
            "request_id": request_id,
            "external_id": external_id,
            "block_ids": block_ids,
            "prompt_tokens": prompt_tokens,
            **keys,
        }
        self.send("submit", requests=[request])

    def cancel(self, request_id: str) -> None:
        self.send("cancel", requests=[{"request_id": request_id}])

    def outcomes(self, count: int) -> dict[str, tuple[str, str]]:
        """The next `count` outcomes, acknowledged: request id to state and reason."""
        found: dict[str, tuple[str, str]] = {}
        while len(found) < count:
            message = self.expect("finished")
            assert message["log"] == self._log
            for number, outcome in enumerate(message["outcomes"], message["first"]):
                if number > self._seen:
                    self._seen = number
                    found[outcome["request_id"]] = outcome["state"], outcome["reason"]
        self.send("acknowledge", log=self._log, seq=self._seen)
        return found

    def register_transfer(self) -> dict[str, Any]:
        """Register memory of arrangement `transfer`: nothing of it is used by the daemon."""
        layout = {
            "regions": [{"name": "label", "size": 1 << 20}],
            "groups": [{"block_size": 16, "num_blocks": 8}],
            "layers": [
                {
                    "name": "layers.0",
                    "group": 0,
                    "tensors": [{"region": 0, "offset": 0, "block_len": 4096}],
                }
            ],
        }
        memory = {
            "source": "transfer",
            "layout": layout,
            "te_rpc_port": 15_000,
            "region_addrs": [1 << 32],
        }
        self.send("register_kv", token=7, memory=memory)
        answer = self.expect("kv_registered")
        assert answer["token"] == 7
        return answer

    def status(self, **keys: Any) -> dict[str, Any]:
        self.send("status", token=9, **keys)
        status: dict[str, Any] = self.expect("status_report")["status"]
        return status

    def __enter__(self) -> PlainClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.send("bye")
        self._context.destroy(linger=1000)


class Peer:
    """The far side: a metaserver that never gets to its answer, and a P rank's REQ socket."""

    def __init__(self) -> None:
        self._posts: queue.Queue[dict[str, Any]] = queue.Queue()
        self._over = threading.Event()
        posts, over = self._posts, self._over

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posts.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                over.wait()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing: pytest shows what matters."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/metaserver"

    def accept(self) -> dict[str, Any]:
        """The next POST's body."""
        return self._posts.get(timeout=TIMEOUT_MS / 1000)

    def ask(self, port: int, payload: bytes) -> bytes:
        """One side channel message, and its answer."""
        with _context() as context, closing(context.socket(zmq.REQ)) as socket:
            socket.linger = 0
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send(payload)
            assert socket.poll(TIMEOUT_MS), "no answer on the side channel"
            return socket.recv()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def _context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.term()
