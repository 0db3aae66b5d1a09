"""One command, seen from the trainer: what is asked for, its output while it runs, its result.

The other side is `keeper/command.py`. Limits are decided in three places, each where it can't be got around: rlimits
and memory there, wall time and output here.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from envs.sandbox.keeper import wire
from envs.sandbox.output import Output
from postrl.contracts import ExecResult, InfraError, Resources

_MAX_ARGUMENT_BYTES = 131_071
"""Linux's limit for one string of execve."""
_MAX_ARGUMENTS_BYTES = 1 << 20
_NOT_EXECUTABLE = 126
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 60.0
_NUM_OPEN_FILES = 256
_NUM_BWRAP_PROCESSES = 1
"""bwrap's own process in the command's pid namespace."""
_CPU_ENDINGS = (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
"""The soft limit's signal, and the hard limit's for a program that ignores it."""
_CPU_SHARE = 0.5
"""Of the limit must be used up for those to be its doing: it is enforced by ticks, and reported precisely."""


def execute(
    connection: socket.socket,
    argv: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    resources: Resources,
) -> ExecResult:
    """Runs one command through the keeper at the other end of `connection`.

    `max_rss_mb` of the result is never below the keeper's own, some 12 MiB: the kernel hands a forked process's peak
    down to the program that it becomes. Raises InfraError or OSError when the sandbox is lost.
    """
    refusal = _refusal([*argv, *environment.values()])
    if refusal is not None:
        return ExecResult(_NOT_EXECUTABLE, b"", f"sandbox: {refusal}\n".encode(), False, False, None, 0.0, 0.0, 0.0)
    begun_s = time.monotonic()
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    outputs = [Output(descriptor, resources.output_bytes) for descriptor in (out_read, err_read)]
    request = {"op": "exec", "argv": list(argv), "env": dict(environment), "limits": _limits(resources)}
    try:
        try:
            wire.send(connection, request, [out_write, err_write])
        finally:
            wire.close_all([out_write, err_write])
        ended, stopped = _follow(connection, outputs, timeout_s)
    finally:
        for output in outputs:
            output.close()
    killed_by, exit_code = _ending(ended, stopped, resources, outputs[1].kept)
    return ExecResult(
        exit_code=exit_code,
        stdout=outputs[0].kept,
        stderr=outputs[1].kept,
        stdout_truncated=outputs[0].truncated,
        stderr_truncated=outputs[1].truncated,
        killed_by=killed_by,
        wall_s=time.monotonic() - begun_s,
        cpu_s=ended["cpu_s"],
        max_rss_mb=ended["max_rss_mb"],
    )


def _follow(connection: socket.socket, outputs: list[Output], timeout_s: float) -> tuple[dict[str, Any], str | None]:
    """Reads the output until the command has ended, or must end: the keeper's report, and why it was stopped.

    The clock starts when the command's processes exist, so that a busy host doesn't eat into the policy's time.
    """
    poll = select.poll()
    streams = {output.descriptor: output for output in outputs}
    for descriptor in (connection.fileno(), *streams):
        poll.register(descriptor, select.POLLIN)
    ended: dict[str, Any] | None = None
    started, stopped = False, None
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while ended is None or streams:
        remaining_s = deadline_s - time.monotonic()
        reason = None
        if remaining_s <= 0:
            if stopped is not None or not started:
                raise InfraError(f"the command did not {'end' if started else 'start'} within {_END_TIMEOUT_S:g} s")
            reason = "timeout"
        for descriptor, _ in poll.poll(max(remaining_s, 0.0) * 1000):
            if descriptor != connection.fileno():
                if not streams[descriptor].read_some():
                    poll.unregister(descriptor)
                    del streams[descriptor]
                continue
            message, _ = wire.receive(connection)
            if message is None:
                raise InfraError("its keeper ended")
            if message["op"] == "started":
                started, deadline_s = True, time.monotonic() + timeout_s
            else:
                ended = message
                poll.unregister(descriptor)
        if any(output.endless for output in outputs):
            reason = "output"
        if reason is not None and stopped is None:
            stopped, deadline_s = reason, time.monotonic() + _END_TIMEOUT_S
            if ended is None:
                wire.send(connection, {"op": "kill"})
    return ended, stopped


def _ending(
    ended: dict[str, Any], stopped: str | None, resources: Resources, stderr: bytes
) -> tuple[str | None, int | None]:
    """`killed_by` and `exit_code`, exactly one of which is None. Raises InfraError when the command never ran."""
    exit_code = ended["exit_code"]
    if stopped == "output":
        return "output", None
    if ended["memory"]:
        return "memory", None
    if exit_code in _CPU_ENDINGS and ended["cpu_s"] >= _CPU_SHARE * resources.cpu_s:
        return "cpu", None
    if exit_code is not None:
        return None, exit_code
    if stopped is not None:
        return stopped, None
    raise InfraError(
        f"bwrap ended without running the command: {ended['error'] or stderr.decode(errors='replace').strip()}"
    )


def _limits(resources: Resources) -> dict[str, list[int]]:
    """Soft and hard limit, by prlimit's names."""
    return {
        "as": [resources.memory_mb << 20] * 2,
        "cpu": [resources.cpu_s, resources.cpu_s + 1],
        "fsize": [resources.file_mb << 20] * 2,
        "nproc": [resources.num_processes + _NUM_BWRAP_PROCESSES] * 2,
        "nofile": [_NUM_OPEN_FILES] * 2,
        "core": [0, 0],
        "memlock": [65_536] * 2,
        "msgqueue": [65_536] * 2,
    }


def _refusal(strings: Sequence[str]) -> str | None:
    """Why no kernel would start a program with these arguments and variables, or None."""
    total = 0
    for string in strings:
        if "\0" in string:
            return "an argument contains a NUL byte"
        try:
            num_bytes = len(os.fsencode(string))
        except UnicodeEncodeError:
            return "an argument is not valid Unicode"
        total += num_bytes
        if num_bytes > _MAX_ARGUMENT_BYTES or total > _MAX_ARGUMENTS_BYTES:
            return "argument list too long"
    return None
