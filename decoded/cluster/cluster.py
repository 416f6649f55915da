"""A running cluster: proxy, P engines, a daemon and D engines, each a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from decoded.cli.query import NoDaemonError, ask_status

from .cores import share_cores
from .nodes import STOP_PATIENCE_S, Node, engine, every, start_child, together
from .plan import Plan, Policy, daemon_command, daemon_environ, proxy_command
from .ports import free_ports
from .processes import Child
from .show import View

_LOOK_EVERY_S = 0.2


class Cluster:
    """`plan`: what it consists of. `folder`: where logs and the daemon's socket go.

    Use it in an `async with`, which stops everything at its end, however that comes.
    """

    def __init__(self, plan: Plan, folder: Path, view: View) -> None:
        self.plan = plan
        self.folder = folder
        self.endpoint = f"ipc://{folder}/decoded.sock"
        self._view = view
        ports = free_ports(plan.p + plan.d + 1)
        self._d_ports = ports[plan.p : -1]
        p_cores, self._d_cores = share_cores(plan.p, plan.d, plan.tp)
        self.daemon = self._daemon(0.0)
        self.p = [
            engine(plan, f"P{n + 1}", ports[n], plan.p_transfer(), p_cores[n], folder)
            for n in range(plan.p)
        ]
        self.d = self._d_nodes()
        command = proxy_command(ports[-1], *(_urls(side) for side in (self.p, self.d)))
        self.proxy = Node("proxy", ports[-1], command, daemon_environ(), folder, plan.model_name)

    # Life

    async def __aenter__(self) -> Cluster:
        for node in self._nodes:
            await node.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """The proxy first, the daemon last."""
        try:
            await self.proxy.__aexit__()
            await every([node.__aexit__() for node in (*self.p, *self.d)])
        finally:
            await self.daemon.stop(STOP_PATIENCE_S)

    async def start(self, p: int | None = None) -> None:
        """Start it and wait until all is ready. Raises ClusterError.

        `p`: only so many of its P engines; the others can be started later.
        """
        started = [*self.p[:p], *self.d, self.proxy]
        self._view.expect(["daemon", *(node.name for node in started)])
        try:
            # D engines look for it when they start.
            await self.start_daemon()
            await together([node.start(self._view) for node in started])
        finally:
            self._view.close()

    def check(self) -> None:
        """Raises ClusterError if something has ended by itself."""
        for child in (self.daemon, *(node.child for node in self._nodes)):
            child.check()

    async def until_one_ends(self) -> None:
        """Watch over it; raises ClusterError when something ends by itself."""
        while True:
            self.check()
            await asyncio.sleep(_LOOK_EVERY_S)

    # Parts

    async def start_daemon(self) -> None:
        """Start the daemon, also again, and wait until it answers."""
        await start_child(self.daemon, self._daemon_answers, self._view)

    async def start_node(self, node: Node) -> None:
        """Start one of its engines, also again."""
        await node.start(self._view)

    async def replace_d(self, policy: Policy) -> None:
        """Stop the D engines and start them anew with this policy."""
        await every([node.__aexit__() for node in self.d])
        self.plan = replace(self.plan, policy=policy)
        self.d = self._d_nodes()
        for node in self.d:
            await node.__aenter__()
        await together([node.start(self._view) for node in self.d])

    async def replace_daemon(self, virtual_delay_s: float) -> None:
        """Stop the daemon and start one that holds virtual requests back for so long; engines
        find it by themselves.
        """
        await self.daemon.stop(STOP_PATIENCE_S)
        self.daemon = self._daemon(virtual_delay_s)
        await self.start_daemon()

    async def status(self, request_id: str | None = None) -> dict[str, Any]:
        """The daemon's status. Raises NoDaemonError."""
        return await asyncio.to_thread(ask_status, self.endpoint, request_id=request_id)

    def curl(self) -> str:
        """A command line that asks the cluster something."""
        return (
            f"curl -s {self.proxy.api.url}/v1/chat/completions "
            "-H 'Content-Type: application/json' -d "
            f'\'{{"model": "{self.plan.model_name}", "max_tokens": 32, "temperature": 0, '
            '"messages": [{"role": "user", "content": "What is the capital of France?"}]}\''
        )

    @property
    def _nodes(self) -> list[Node]:
        return [*self.p, *self.d, self.proxy]

    def _daemon(self, virtual_delay_s: float) -> Child:
        command = daemon_command(self.endpoint, virtual_delay_s)
        return Child("daemon", command, self.folder / "daemon.log", daemon_environ())

    def _d_nodes(self) -> list[Node]:
        transfer = self.plan.d_transfer(self.endpoint)
        return [
            engine(self.plan, f"D{n + 1}", port, transfer, cores, self.folder)
            for n, (port, cores) in enumerate(zip(self._d_ports, self._d_cores, strict=True))
        ]

    async def _daemon_answers(self) -> bool:
        try:
            await self.status()
        except NoDaemonError:
            return False
        return True


def _urls(nodes: list[Node]) -> list[str]:
    return [node.api.url for node in nodes]
