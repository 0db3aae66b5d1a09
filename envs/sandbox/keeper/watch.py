"""How much memory the processes of a command use together, where no control group counts it."""

from __future__ import annotations

import os

_PAGE = os.sysconf("SC_PAGE_SIZE")


def anonymous_bytes(root_pid: int) -> int:
    """Resident memory that isn't backed by files, summed over `root_pid` and its descendants.

    `root_pid` is the first process of the command's pid namespace: whatever detaches itself becomes its child. Pages
    shared after a fork count once for each process. Processes that end meanwhile are skipped.
    """
    total = 0
    pending = [root_pid]
    while pending:
        pid = pending.pop()
        try:
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                _, resident, shared, *_ = map(int, file.read().split())
            total += (resident - shared) * _PAGE
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                    pending += map(int, file.read().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total
