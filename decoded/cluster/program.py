"""What the programs that start processes have in common: a folder, signals, an exit code."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from .api import ApiError
from .model import ModelError
from .processes import ClusterError


def run_program(
    name: str,
    model: Callable[[], Path],
    console: Console,
    job: Callable[[Path, Path], Coroutine[Any, Any, bool]],
) -> int:
    """Run `job` with a checkpoint's folder and one for logs; the exit code.

    0 if it says that all is as it should be, else 1, and 128 + n after signal n, which
    cancels it. `model` finds the checkpoint. The logs are kept when something went wrong.
    """
    caught: list[int] = []
    folder = Path(tempfile.mkdtemp(prefix=f"decoded-{name}-"))
    good = False
    try:
        good = asyncio.run(_until_signal(job(model(), folder), caught))
    except asyncio.CancelledError:
        good = True
        return 128 + caught[0]
    except (ClusterError, ModelError, ApiError) as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
    finally:
        if good:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"The logs are in {folder}", markup=False, soft_wrap=True)
    return 0 if good else 1


async def _until_signal(job: Coroutine[Any, Any, bool], caught: list[int]) -> bool:
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
