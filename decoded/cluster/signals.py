"""Signals that end a program which has to end others first."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def until_signal(job: Coroutine[Any, Any, T], caught: list[int]) -> T:
    """A signal goes into `caught` and cancels the job, so that its processes are ended."""
    task = asyncio.current_task()
    assert task is not None

    def stop(number: int) -> None:
        # Once: a second one must not break off the stopping.
        if not caught:
            caught.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return await job
