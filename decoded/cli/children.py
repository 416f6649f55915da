"""How programs of this package start the processes of a run."""

from __future__ import annotations

import sys
from typing import Any

OWN_GROUP: dict[str, Any] = {"process_group": 0}
"""Arguments of `subprocess` for a child in a process group of its own: Ctrl-C is for the parent,
which ends its children in order.

In a group, not in a session: Linux shares the processors out between sessions first
(sched_autogroup), and where one's threads sleep a few microseconds at a time, as vLLM's do,
those of other sessions waited for seconds (measured with Linux 6.18 on two cores).
"""
if sys.version_info < (3, 11):
    OWN_GROUP = {"start_new_session": True}
