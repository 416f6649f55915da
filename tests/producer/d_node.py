"""A D rank for tests, in a process of its own: memory registered with Mooncake, and a ROUTER.

Run with a JSON object as the only argument: region, size, layout, progress. It prints one
JSON line with its ports, then one line per message that it hears. Lines on standard input
command it: `fence` closes its Mooncake engine; the end of input ends it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from types import TracebackType
from typing import Any

import msgspec
import zmq

from decoded.kv.layout import layer_metadata
from decoded.kv.regions import SharedRegion
from decoded.kv.transfer import TransferEngine
from decoded.wire.layout import KvLayout
from decoded.wire.side_channel import (
    ACK,
    GetMeta,
    Metadata,
    Request,
    decode_request,
    encode_metadata,
)

HOST = "127.0.0.1"


class DNode:
    """The parent's side of the process."""

    def __init__(self, region: SharedRegion, layout: KvLayout, progress: bool = True) -> None:
        config = {
            "region": region.name,
            "size": region.size,
            "layout": msgspec.to_builtins(layout),
            "progress": progress,
        }
        command = [sys.executable, "-m", "tests.producer.d_node", json.dumps(config)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port: int = self._line()["port"]

    def next(self) -> Request:
        """The next message that D heard; blocks until there is one."""
        return decode_request(bytes.fromhex(self._line()["heard"]))

    def fence(self) -> None:
        """Close D's Mooncake engine, its side channel goes on."""
        self._command("fence")
        assert self._line() == {"fenced": True}

    def stop(self) -> None:
        """Stop the process, with its sockets open, until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _command(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the D node has ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def rest(self) -> list[Request]:
        """End the process and return what it had heard and was not asked for."""
        heard, _ = self._process.communicate(timeout=60)
        return [decode_request(bytes.fromhex(json.loads(x)["heard"])) for x in heard.splitlines()]

    def __enter__(self) -> DNode:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.returncode is None:
            self._process.kill()
            self._process.communicate()


def main() -> None:
    config = json.loads(sys.argv[1])
    layout = msgspec.convert(config["layout"], KvLayout)
    region = SharedRegion.attach(config["region"], config["size"])
    engine = TransferEngine.open(HOST, "tcp")
    engine.register(region.address, region.size)
    layers = layer_metadata(layout, [region.address])
    metadata = encode_metadata(Metadata(engine.port, layers, config["progress"]))
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    _say(port=router.bind_to_random_port(f"tcp://{HOST}"))
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if router in ready:
            identity, empty, payload = router.recv_multipart()
            asks = isinstance(decode_request(payload), GetMeta)
            router.send_multipart([identity, empty, metadata if asks else ACK])
            _say(heard=payload.hex())
        if sys.stdin.fileno() in ready:
            command = sys.stdin.readline()
            if not command:
                break
            assert command == "fence\n"
            engine.close()
            _say(fenced=True)
    engine.close()
    context.destroy(linger=0)
    region.close()


def _say(**line: object) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
