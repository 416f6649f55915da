"""Virtual requests: finished without a transfer, at once or after a modelled delay.

No metaserver is called, no side channel knows of them, and no KV is touched: the
blocks hold whatever was there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decoded.core import reasons
from decoded.core.events import Event, Fulfilled
from decoded.core.request import Request, RequestKey


@dataclass(frozen=True)
class VirtualDelay:
    """How long a P node would have taken: `latency_s` plus the request's bytes over a bandwidth.

    The bytes are those of the tokens that the engine does not hold yet. A bandwidth
    of 0 stands for none: the delay is `latency_s` alone.
    """

    latency_s: float
    bytes_per_token: float = 0.0
    bandwidth_bytes_per_s: float = 0.0

    def of(self, request: Request) -> float:
        """The delay of one request, in seconds."""
        if not self.bandwidth_bytes_per_s:
            return self.latency_s
        tokens = max(request.prompt_tokens - request.cached_tokens, 0)
        return self.latency_s + tokens * self.bytes_per_token / self.bandwidth_bytes_per_s


class VirtualPath:
    """Completes a request in the turn in which it starts, or when its delay is over."""

    def __init__(
        self, dispatch: Callable[[Event], None], delay: VirtualDelay | None = None
    ) -> None:
        self._dispatch = dispatch
        self._delay = delay
        self._timers: dict[RequestKey, asyncio.TimerHandle] = {}

    def start(self, request: Request) -> Sequence[Event]:
        done = Fulfilled(request.key, request.attempt, reasons.VIRTUAL)
        delay = self._delay.of(request) if self._delay is not None else 0.0
        if delay <= 0:
            return (done,)
        loop = asyncio.get_running_loop()
        self._timers[request.key] = loop.call_later(delay, self._dispatch, done)
        return ()

    def stop(self, request: Request) -> None:
        timer = self._timers.pop(request.key, None)
        if timer is not None:
            timer.cancel()
