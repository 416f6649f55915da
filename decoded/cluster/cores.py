"""Which cores each engine computes on, so that engines do not share one without need."""

from __future__ import annotations

import os
from collections.abc import Sequence


def share_cores(
    p: int, d: int, tp: int = 1, cores: Sequence[int] | None = None
) -> tuple[list[str], list[str]]:
    """VLLM_CPU_OMP_THREADS_BIND of each of `p` P engines and of each of `d` D engines.

    P and D engines get half of the cores each and share it evenly, D engines without any P all
    of them; with fewer cores than ranks several ranks share one. `tp`: ranks per engine.
    Every rank of a side gets as many cores as any other, so that engines of the same kind
    compute alike. `cores`: the numbers of those that may be used; None: this process's.
    """
    usable = sorted(os.sched_getaffinity(0) if cores is None else cores)
    if tp > 1:
        # An engine's own ranks wait for each other: better all cores for each engine.
        return _side(usable, p, tp), _side(usable, d, tp)
    half = len(usable) // 2 if p else 0
    return _side(usable[:half] or usable, p, tp), _side(usable[half:], d, tp)


def _side(cores: Sequence[int], engines: int, tp: int) -> list[str]:
    ranks = engines * tp
    each = max(len(cores) // max(ranks, 1), 1)
    parts = [
        ",".join(str(cores[(rank * each + k) % len(cores)]) for k in range(each))
        for rank in range(ranks)
    ]
    return ["|".join(parts[n * tp : (n + 1) * tp]) for n in range(engines)]
