"""DONE to finished of real requests, without a byte of KV: the daemon only ever hears of it."""

from __future__ import annotations

import time
from contextlib import ExitStack

import zmq

from decoded.wire import link as wire
from decoded.wire.layout import KvGroup, KvLayer, KvLayout, KvTensor, Region, TransferMemory
from decoded.wire.side_channel import ACK, Done, encode_request

from .dealer import Dealer, connect
from .proxy import InstantProxy
from .workload import BLOCK_SIZE, HOST, real_submissions

_BLOCK_LEN, _BLOCKS, _LAYERS = 4_096, 4_096, 4
# Metaserver calls at the same time; more would only queue up at the listener.
_CALLS = 64
_TIMEOUT_S = 30


class Finisher:
    """A D engine whose requests receive, and the producer that says DONE for them.

    The metaserver runs in a thread and answers at once: when DONE is measured all its
    connections are closed and nothing is left for it to do.
    """

    def __init__(self, endpoint: str, engine_id: str) -> None:
        with ExitStack() as stack:
            self._metaserver = stack.enter_context(InstantProxy())
            worker = Dealer(endpoint, engine_id, role="worker", session="worker", subscribe=False)
            stack.enter_context(worker)
            self._scheduler = stack.enter_context(Dealer(endpoint, engine_id))
            worker.send(wire.RegisterKv(1, _memory()))
            registered = worker.expect(wire.KvRegistered)
            address = f"tcp://{registered.side_channel_host}:{registered.side_channel_port}"
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            stack.callback(context.term)
            self._one = stack.enter_context(connect(context, address, zmq.REQ))
            self._many = stack.enter_context(connect(context, address))
            self._stack = stack.pop_all()

    def latencies(self, count: int) -> list[float]:
        """DONE sent to finished received, one after the other, in seconds."""
        clock, found = time.perf_counter, []
        for done in self._receiving(count):
            began = clock()
            self._one.send(done)
            self._scheduler.outcomes(1)
            found.append(clock() - began)
            if self._one.recv() != ACK:
                raise RuntimeError("the daemon did not acknowledge a DONE")
        return found

    def rate(self, in_flight: int, count: int) -> float:
        """Requests finished per second with `in_flight` DONE messages under way."""
        waiting = self._receiving(count)
        sent, done = min(in_flight, count), 0
        began = time.perf_counter()
        self._say(waiting[:sent])
        while done < count:
            ended = len(self._scheduler.finished())
            done += ended
            self._say(waiting[sent : sent + ended])
            sent += ended
        took = time.perf_counter() - began
        for _ in range(count):
            if self._many.recv_multipart() != [b"", ACK]:
                raise RuntimeError("the daemon did not acknowledge a DONE")
        return count / took

    def _say(self, messages: list[bytes]) -> None:
        for message in messages:
            self._many.send_multipart((b"", message))

    def _receiving(self, count: int) -> list[bytes]:
        """Bring `count` requests so far that only DONE is missing; their DONE messages."""
        requests = real_submissions(count, self._metaserver.url)
        for at in range(0, count, _CALLS):
            part = requests[at : at + _CALLS]
            self._scheduler.submit(part)
            for _ in part:
                self._metaserver.take()
        # Answered is not heard: the daemon has to have read the answers.
        until = time.monotonic() + _TIMEOUT_S
        while self._calls():
            if time.monotonic() > until:
                raise TimeoutError("the daemon does not end its metaserver calls")
        return [encode_request(Done(each.external_id, 1, f"{HOST}:1")) for each in requests]

    def _calls(self) -> int:
        self._scheduler.send(wire.StatusQuery(limit=0))
        calls: int = self._scheduler.expect(wire.StatusReport).status["metaserver_calls"]
        return calls

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Finisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory() -> TransferMemory:
    """A registration that names memory which is never written to."""
    size = _BLOCK_LEN * _BLOCKS
    layers = [
        KvLayer(f"model.layers.{index}.self_attn.attn", 0, [KvTensor(0, index * size, _BLOCK_LEN)])
        for index in range(_LAYERS)
    ]
    layout = KvLayout([Region("bench", size * _LAYERS)], [KvGroup(BLOCK_SIZE, _BLOCKS)], layers)
    return TransferMemory(layout, 15_000, [2**40])
