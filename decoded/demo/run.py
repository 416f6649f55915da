"""The demo from start to end: starts the processes, passes their words on, collects evidence."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from decoded.cli.query import NoDaemonError, ask_status

from .evidence import Evidence
from .processes import Child, Line
from .scenario import D_BLOCKS, ENGINE_ID, Arrangement, Request, make_batch
from .shape import BLOCK_SIZE, SHAPE, block_len
from .show import View
from .verify import Report, judge

_LOOK_EVERY_S = 0.05
_END_PATIENCE_S = 10.0
_KILL_PATIENCE_S = 2.0


class DemoError(Exception):
    """The run came to no end; the text says why."""


async def run(
    config: Path, memory: Arrangement, timeout_s: float, view: View, npus: Npus | None = None
) -> Report:
    """Run the demo; every process has ended when this returns, also when it is cancelled.

    `config`: the daemon's configuration. `memory`: how D's KV memory is arranged.
    """
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="decoded-demo-"))
    demo = Demo(config, memory, folder, view, npus)
    report = Report(memory)
    try:
        await asyncio.wait_for(demo.play(), timeout_s)
    except asyncio.TimeoutError:
        report.problems.append(f"not at its end after {timeout_s:g} s: {demo.missing()}")
    except DemoError as error:
        report.problems.append(str(error))
    else:
        report = judge(demo.batch, demo.evidence, memory)
    finally:
        view.close()
        await demo.close()
        shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.monotonic() - started
    return report


class Npus(NamedTuple):
    """The machine's numbers of the NPUs that hold D's and P's KV memory."""

    d: int
    p: int


class Demo:
    """One run: a daemon, a P process, a D engine, and the single-process run beside them."""

    def __init__(
        self,
        config: Path,
        memory: Arrangement,
        folder: Path,
        view: View,
        npus: Npus | None = None,
    ) -> None:
        self.batch = make_batch()
        self.evidence = Evidence(folder)
        self._memory = memory
        self._npus = npus
        self._config = config
        self._folder = folder
        self._view = view
        self._endpoint = f"ipc://{folder}/decoded.sock"
        self._events: asyncio.Queue[Line] = asyncio.Queue()
        self._daemon = Child("daemon", folder, self._events, speaks=False)
        self._p = Child("P", folder, self._events)
        self._d = Child("D", folder, self._events)
        self._reference = Child("reference", folder, self._events)
        self._children = (self._daemon, self._p, self._d, self._reference)
        self._stories: list[asyncio.Task[None]] = []
        self._told: dict[str, dict[str, Any]] = {}
        self._paused: set[str] = set()

    async def play(self) -> None:
        """Everything up to the end of every process. Raises DemoError."""
        await self._start()
        await self._until("P ready", "D ready")
        self._d.tell("start", metaserver=self._told["P ready"]["url"])
        watching = asyncio.create_task(self._watch())
        try:
            await self._until("D finished", "reference finished", *self._pushes())
        finally:
            watching.cancel()
        await asyncio.gather(*self._stories)
        self._d.tell("seal")
        await self._until("D sealed")
        self.evidence.touched = self._told["D sealed"]["touched"]
        await self._end(_END_PATIENCE_S)
        self.evidence.exit_codes = {child.name: child.code for child in self._children}

    async def close(self) -> None:
        """End what still runs."""
        for story in self._stories:
            story.cancel()
        await self._end(_KILL_PATIENCE_S)

    def missing(self) -> str:
        """What a run that took too long was waiting for."""
        without = [r.external_id for r in self.batch if r.external_id not in self.evidence.outcomes]
        parts = [f"no outcome of {', '.join(without)}"] if without else []
        told = {"P ready", "D ready", "reference finished", "D finished", *self._pushes()}
        parts += [f"never heard: {', '.join(sorted(told - set(self._told)))}"]
        return "; ".join(parts)

    def _pushes(self) -> list[str]:
        return [f"pushed {request.external_id}" for request in self.batch if request.pushed]

    async def _start(self) -> None:
        settings = {"link.endpoint": self._endpoint}
        if self._npus is not None:
            settings["transfer.protocol"] = "ascend"
        if self._memory == "daemon":
            settings["kv.pool"] = json.dumps(_pool(self._npus))
        d_npu, p_npu = ("-1", "-1") if self._npus is None else map(str, self._npus)
        flags = [part for key, text in settings.items() for part in ("--set", f"{key}={text}")]
        await self._daemon.start("decoded", "serve", "--config", str(self._config), *flags)
        await self._p.start("decoded.demo.prefill", str(self._folder), p_npu)
        await self._d.start(
            "decoded.demo.engine", self._endpoint, str(self._folder), self._memory, d_npu
        )
        await self._reference.start("decoded.demo.reference")

    async def _end(self, patience_s: float) -> None:
        """End all processes, the daemon last."""
        others = [child for child in self._children if child is not self._daemon]
        await asyncio.gather(*(child.end(patience_s) for child in others))
        await self._daemon.end(patience_s)

    async def _until(self, *wanted: str) -> None:
        """Take what the processes tell until all of that was told."""
        while not self._told.keys() >= set(wanted):
            self._hear(await self._events.get())

    def _hear(self, line: Line) -> None:
        child, what, fields = line
        external_id = fields.get("id", "")
        if what == "exited":
            if child != "reference" or fields["code"] != 0:
                raise DemoError(self._unexpected_end(child, fields["code"]))
        elif what == "outcome":
            self._outcome(external_id, fields)
        elif what == "pushed":
            self.evidence.pushes[external_id] = fields
            self._told[f"pushed {external_id}"] = {}
        elif what == "paused":
            self._paused.add(external_id)
            self._view.note(f"{external_id}: P pauses after {fields['layers']} layers; cancelling")
            self._d.tell("cancel", id=external_id)
        elif what == "cancelling":
            self.evidence.cancelling[external_id] = fields["states"]
            self._view.note(f"{external_id}: {', '.join(fields['states'])}; P may go on")
            self._paused.discard(external_id)
            self._p.tell("go on", id=external_id)
        elif what == "tokens":
            whose = self.evidence.tokens if child == "D" else self.evidence.reference
            whose[external_id] = fields["tokens"]
        else:
            self._told[f"{child} {what}"] = dict(fields)

    def _outcome(self, external_id: str, fields: Any) -> None:
        if external_id in self._paused:
            self.evidence.early.add(external_id)
        self.evidence.outcomes.setdefault(external_id, []).append(fields)
        self._view.ended(external_id, fields["state"], fields["reason"], fields["elapsed_s"])
        [request] = [one for one in self.batch if one.external_id == external_id]
        self._stories.append(asyncio.create_task(self._keep_story(request)))

    def _unexpected_end(self, name: str, code: int) -> str:
        [child] = [child for child in self._children if child.name == name]
        return f"the {name} process ended with code {code}; its log ends with\n{child.log_tail()}"

    async def _watch(self) -> None:
        """Show what the daemon tells of the requests in flight, until cancelled."""
        while True:
            for report in await self._ask():
                self._show(report)
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _ask(self, request: Request | None = None) -> list[Any]:
        request_id = None if request is None else request.request_id
        try:
            status = await asyncio.to_thread(
                ask_status, self._endpoint, engine_id=ENGINE_ID, request_id=request_id
            )
        except NoDaemonError:
            return []  # its end is told elsewhere
        return list(status["requests"])

    async def _keep_story(self, request: Request) -> None:
        """Keep what the daemon tells of a request that has ended."""
        for report in await self._ask(request):
            self.evidence.daemon[request.external_id] = report
            self._show(report)

    def _show(self, report: Any) -> None:
        senders = [one for rank in report["ranks"] for one in rank["senders"]]
        layers = min((sender["layers_in"] for sender in senders), default=0)
        self._view.progress(report["external_id"], report["state"], layers)


def _pool(npus: Npus | None) -> dict[str, Any]:
    """kv.pool of the daemon's configuration, where it owns the memory."""
    tensor = {"block_len": block_len()}
    layer = {
        "name": "model.layers.{}.self_attn.attn",
        "count": SHAPE.layers,
        "tensors": [tensor, tensor],
    }
    group = {"block_size": BLOCK_SIZE, "num_blocks": D_BLOCKS}
    place = {} if npus is None else {"npus": [npus.d]}
    return {"groups": [group], "layers": [layer], **place}
