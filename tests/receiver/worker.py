"""A worker rank in a process of its own: it has KV memory, registers it, and can be killed.

`python -m tests.receiver.worker endpoint engine_id rank world_size`; commands are JSON lines
on standard input, each answered by a JSON line: ["share" | "map" | "run"], ["unregister"],
["read", offset, length].
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from secrets import token_hex
from types import TracebackType
from typing import Any

import msgspec

from decoded.kv.regions import SharedRegion
from decoded.kv.transfer import TransferEngine
from decoded.testing import BareClient
from decoded.wire import link as wire
from decoded.wire.layout import KvLayout, PoolMemory, Region, SharedMemory, TransferMemory
from tests.edges.support import HOST, register, small_layout, until


class Worker:
    """The test's end."""

    def __init__(self, endpoint: str, engine_id: str, rank: int = 0, world_size: int = 1) -> None:
        command = [sys.executable, "-m", "tests.receiver.worker"]
        self._process = subprocess.Popen(
            [*command, endpoint, engine_id, str(rank), str(world_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, what: str, *args: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *args]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the worker died"
        return json.loads(line)

    def register(self, how: str) -> wire.KvRegistered:
        """`share`: its own shared memory; `map`: the pool; `run`: its own transfer engine."""
        self.tell(how)
        return msgspec.convert(self.answer(), wire.KvRegistered)

    def read(self, offset: int, length: int) -> bytes:
        self.tell("read", offset, length)
        return bytes.fromhex(self.answer())

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


class _Actor:
    region: SharedRegion
    engine: TransferEngine | None = None

    def __init__(self, client: BareClient) -> None:
        self._client = client
        self._made: list[SharedRegion] = []

    def share(self) -> Any:
        size = small_layout().regions[0].size
        self.region = self._create(size)
        return self._register(SharedMemory(small_layout(self.region.name)))

    def map(self) -> Any:
        answer = self._register(PoolMemory())
        [region] = msgspec.convert(answer["layout"], KvLayout).regions
        self.region = SharedRegion.attach(region.name, region.size)
        return answer

    def run(self) -> Any:
        layout = small_layout()
        [region] = layout.regions
        self.region = self._create(region.size)
        self.engine = TransferEngine.open(HOST)
        self.engine.register(self.region.address, region.size)
        own = KvLayout([Region("own", region.size)], layout.groups, layout.layers)
        return self._register(TransferMemory(own, self.engine.port, [self.region.address]))

    def read(self, offset: int, length: int) -> str:
        return self.region.buffer[offset : offset + length].hex()

    def unregister(self) -> bool:
        self._client.send(wire.UnregisterKv(2))
        return self._client.expect(wire.KvUnregistered, timeout_s=60).token == 2

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
        for region in self._made:
            region.unlink()
        self.region.close()

    def _create(self, size: int) -> SharedRegion:
        name = f"/decoded-w{os.getpid()}-{token_hex(3)}"
        self._made.append(SharedRegion.create(name, size))
        return self._made[-1]

    def _register(self, memory: SharedMemory | PoolMemory | TransferMemory) -> Any:
        answer = register(self._client, memory)
        return msgspec.to_builtins(msgspec.structs.asdict(answer))


def seated(client: BareClient, hello: wire.Hello) -> bool:
    """Whether the seat is ours. A worker that was killed may keep it for a moment."""
    client.send(hello)
    answer = client.receive()
    if isinstance(answer, wire.Error):
        assert answer.code == "seat_taken", answer
    return isinstance(answer, wire.Welcome)


def main() -> None:
    endpoint, engine_id, rank, world_size = sys.argv[1:]
    with BareClient(endpoint) as client:
        hello = wire.Hello(
            wire.PROTOCOL_VERSION,
            engine_id,
            session=f"w-{os.getpid()}",
            role="worker",
            rank=int(rank),
            world_size=int(world_size),
            subscribe=False,
        )
        until(lambda: seated(client, hello))
        actor = _Actor(client)
        for line in sys.stdin:
            what, *args = json.loads(line)
            print(json.dumps(getattr(actor, what)(*args)), flush=True)
        client.send(wire.Bye())
    actor.close()


if __name__ == "__main__":
    main()
