"""Whether the wall clock is kept in step with other nodes'.

The daemon itself only takes differences of the monotonic clock. Log lines have the wall clock's
time, and are hard to read beside a prefill node's if the two are apart.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

from .report import Findings

# From adjtimex(2): the clock's state, and a bit of `status`.
_TIME_ERROR = 5
_STA_UNSYNC = 0x0040
_FAR_OFF_S = 0.1


class _Timex(ctypes.Structure):
    """The beginning of `struct timex`, and room for the rest (208 bytes on 64-bit machines)."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


@dataclass(frozen=True)
class Discipline:
    """What the kernel knows of its clock. `error_s`: how far off it is at most."""

    synchronised: bool
    error_s: float


def read_discipline() -> Discipline:
    """Ask the kernel; changes nothing. Raises OSError where that is not allowed."""
    timex = _Timex(modes=0)
    libc = ctypes.CDLL(None, use_errno=True)
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    synchronised = state != _TIME_ERROR and not timex.status & _STA_UNSYNC
    return Discipline(synchronised, timex.maxerror / 1e6)


def look_at_clock(findings: Findings) -> None:
    try:
        discipline = read_discipline()
    except OSError as error:
        findings.note("clock", f"the kernel does not say whether it is set: {error.strerror}")
        return
    judge(findings, discipline)


def judge(findings: Findings, discipline: Discipline) -> None:
    """A note at most: what is off is the comparison of logs, not the daemon."""
    apart = "times in logs of several nodes cannot be compared"
    if not discipline.synchronised:
        remedy = "run chrony, systemd-timesyncd or ntpd on the node (not in the container)"
        findings.note("clock", f"it is not synchronised: {apart}", remedy)
    elif discipline.error_s > _FAR_OFF_S:
        found = f"synchronised, but perhaps {discipline.error_s * 1000:.0f} ms off: {apart}"
        findings.note("clock", found, "chronyc tracking, or timedatectl timesync-status, says why")
    else:
        findings.ok("clock", f"synchronised, at most {discipline.error_s * 1000:.1f} ms off")
