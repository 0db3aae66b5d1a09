"""What the processes of a running command use together, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICK = os.sysconf("SC_CLK_TCK")
_UTIME = 11
"""Index in /proc/PID/stat after the program's name; stime, cutime and cstime follow."""


@dataclass(frozen=True)
class Usage:
    cpu_s: float
    """Of these processes and of those that they have waited for."""
    max_rss_kb: int
    """The largest resident set that one of them has had."""
    anonymous_bytes: int
    """Resident memory not backed by files. Pages that processes share after a fork count once for each of them."""


def observe(root_pid: int) -> Usage:
    """The usage of `root_pid` and its descendants; those that end meanwhile are skipped.

    `root_pid` is the first process of the command's pid namespace: whatever detaches itself becomes its child.
    """
    cpu_ticks, max_rss_kb, anonymous_bytes = 0, 0, 0
    pending = [root_pid]
    while pending:
        pid = pending.pop()
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                pending += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
            times = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()[_UTIME : _UTIME + 4]
            _, resident, shared, *_ = map(int, _read(f"/proc/{pid}/statm").split())
            peak = _read(f"/proc/{pid}/status").partition("VmHWM:")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        cpu_ticks += sum(map(int, times))
        anonymous_bytes += (resident - shared) * _PAGE
        max_rss_kb = max(max_rss_kb, int(peak[0]) if peak else 0)
    return Usage(cpu_ticks / _TICK, max_rss_kb, anonymous_bytes)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
