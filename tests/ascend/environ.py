"""The environment in which a program finds the stand-in in place of CANN.

    subprocess.run([sys.executable, "program.py"], env=environment(devices=2))

runs any Python program of this environment, unchanged, with torch_npu and Mooncake's `ascend`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .build import build

_OURS = ("ASCEND_STANDIN_", "ASCEND_RT_VISIBLE_DEVICES")


def environment(
    *,
    devices: int = 2,
    visible: Sequence[int] | None = None,
    memory_bytes: int | None = None,
    guard: bool = True,
    delay_s: float = 0.0,
    soc: str | None = None,
    fault: str | None = None,
    fault_file: Path | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Variables for a child process; `base` is what they are added to, os.environ by default.

    devices: how many the machine has; visible: which of them the child sees, in its order.
    memory_bytes: of each device. guard: whether a host access to device memory faults.
    delay_s: how long each operation of a stream waits before it runs.
    fault: "refuse", "stall", "fail" or "die", and which transfers it strikes: all, or one
    ("fail 3"), or several ("fail 3-4", "fail 3-").
    fault_file: a file that says so instead, read anew at each transfer.

    Builds the libraries if they are not there yet. Raises BuildError, or ModuleNotFoundError
    where torch_npu is not installed.
    """
    result = dict(os.environ if base is None else base)
    for name in [name for name in result if name.startswith(_OURS)]:
        del result[name]
    cann = build()
    path = result.get("LD_LIBRARY_PATH")
    result["LD_LIBRARY_PATH"] = f"{cann / 'lib64'}:{path}" if path else f"{cann / 'lib64'}"
    # torch_npu warns on standard output if these are missing, in the middle of what a child says.
    result["ASCEND_HOME_PATH"] = str(cann)
    result["ASCEND_OPP_PATH"] = str(cann / "opp")
    # Otherwise the first operator that fails raises once and later ones do nothing.
    result["TASK_QUEUE_ENABLE"] = "0"
    result["ASCEND_STANDIN_DEVICES"] = str(devices)
    result["ASCEND_STANDIN_GUARD"] = "1" if guard else "0"
    result["ASCEND_STANDIN_DELAY_US"] = str(round(delay_s * 1e6))
    optional = {
        "ASCEND_RT_VISIBLE_DEVICES": None if visible is None else ",".join(map(str, visible)),
        "ASCEND_STANDIN_MEMORY_BYTES": None if memory_bytes is None else str(memory_bytes),
        "ASCEND_STANDIN_SOC": soc,
        "ASCEND_STANDIN_FAULT": fault,
        "ASCEND_STANDIN_FAULT_FILE": None if fault_file is None else str(fault_file),
    }
    result.update({name: value for name, value in optional.items() if value is not None})
    return result
