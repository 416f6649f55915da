"""One HTTP server of a cluster: an engine, or the proxy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from .api import Api, ApiError
from .plan import Plan
from .ports import HOST
from .processes import Child, ClusterError
from .show import View

STOP_PATIENCE_S = 15.0
_LOOK_EVERY_S = 0.2
_READY_WITHIN_S = 300.0
_SHOWN_CHARS = 70


class Node:
    """`command` serves HTTP at `port`. Use it in an `async with`, which stops it at the end."""

    def __init__(
        self,
        name: str,
        port: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        folder: Path,
        model_name: str,
    ) -> None:
        self.name = name
        self.child = Child(name, command, folder / f"{name}.log", environ)
        self.api = Api(f"http://{HOST}:{port}", model_name)

    async def __aenter__(self) -> Node:
        await self.api.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        await self.api.__aexit__()

    async def start(self, view: View) -> None:
        """Start it and wait until it is healthy. Raises ClusterError."""
        await start_child(self.child, self._healthy, view)

    async def stop(self) -> None:
        """Stop it, if it runs."""
        await self.child.stop(STOP_PATIENCE_S)

    async def _healthy(self) -> bool:
        try:
            await self.api.get("/health")
        except ApiError:
            return False
        return True


def engine(
    plan: Plan, name: str, port: int, transfer: Mapping[str, Any] | None, cores: str, folder: Path
) -> Node:
    """A vLLM engine. `transfer`: its --kv-transfer-config; None for one that stands alone."""
    command, environ = plan.engine_command(port, transfer), plan.engine_environ(cores)
    return Node(name, port, command, environ, folder, plan.model_name)


async def start_child(child: Child, answers: Callable[[], Awaitable[bool]], view: View) -> None:
    """Start a process and wait until it answers. Raises ClusterError."""
    started = time.monotonic()
    await child.start()
    while not await answers():
        child.check()
        if time.monotonic() - started > _READY_WITHIN_S:
            raise ClusterError(
                f"{child.name} is not ready after {_READY_WITHIN_S:g} s; its log, {child.log}, "
                f"ends with\n{child.tail()}"
            )
        view.told(child.name, child.last_line()[:_SHOWN_CHARS])
        await asyncio.sleep(_LOOK_EVERY_S)
    view.ready(child.name, time.monotonic() - started)


async def together(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do them all at once. The first error ends the others, and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def every(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Do them all at once, each to its end; then raise the first error, if there was one."""
    for result in await asyncio.gather(*jobs, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
