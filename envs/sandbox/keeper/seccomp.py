"""A filter for system calls that no task needs and that reach around the other limits, or deep into the kernel.

memfd_create and System V IPC hold memory that no rlimit counts; the others are large attack surfaces that unprivileged
users are granted on many machines. They fail with EPERM. Calls of a foreign architecture (32-bit, x32) have other
numbers, so none of them is let through.
"""

from __future__ import annotations

import os
import struct

_DENIED = {
    # name: (x86_64, aarch64)
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine: its audit number, its column above."""
_X32_BIT = 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _DENY, _KILL = 0x7FFF0000, 0x00050001, 0x80000000


def program(machine: str | None = None) -> bytes | None:
    """The filter as bwrap's --seccomp reads it; None for a machine whose numbers aren't known here."""
    machine = machine or os.uname().machine
    if machine not in _MACHINES:
        return None
    audit, column = _MACHINES[machine]
    numbers = sorted(row[column] for row in _DENIED.values())
    code = [
        (_LOAD, 0, 0, 4),  # the architecture
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # the number of the call
        (_AT_LEAST, len(numbers) + 1, 0, _X32_BIT),
        *((_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
