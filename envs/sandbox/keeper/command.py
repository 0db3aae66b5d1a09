"""One command in one bwrap, from fork to the last of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
from typing import Any

from . import cgroups, kernel, wire
from .box import Box
from .usage import Usage, observe

_WATCH_MS = 50
_ISOLATION = (
    *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
    *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
    *("--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv"),
)
_OUTSIDE_ENVIRONMENT: dict[str, str] = {}
"""bwrap's own. The command's goes through --setenv, so that no LD_PRELOAD in it reaches a process outside."""


def run(connection: socket.socket, box: Box, message: dict[str, Any], stdout: int, stderr: int) -> dict[str, Any]:
    """Runs `message["argv"]` with `env` and `limits` and returns the `ended` message.

    `exit_code` is None when the command was killed, or when bwrap didn't get as far as starting it; then `error` or
    stderr says why.
    """
    oom_kills = cgroups.oom_kills(box.group) if box.group else 0
    status_read, status_write = os.pipe()
    keeper = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        wire.close_all([stdout, stderr, status_read, status_write])
        return _ended(error=f"fork: {error}")
    if child == 0:
        _become_bwrap(box, message, stdout, stderr, status_write, keeper)
    wire.close_all([stdout, stderr, status_write])
    monitor = os.pidfd_open(child)
    try:
        status, stopped_by = _wait(connection, box, monitor, status_read, oom_kills)
        init = _facts(status).get("child-pid")
        # Processes that are killed together are counted by nobody, so they are looked at before.
        observed = observe(init) if stopped_by and init else Usage(0.0, 0, 0)
        cpu_s, max_rss_kb = _end_all(child)
        facts = _facts(status + _drain(status_read))
    finally:
        wire.close_all([monitor, status_read])
    # A command may have closed its work directory; that must not look like a sandbox that can't start.
    os.chmod(f"{box.disk}/work", 0o755)
    return _ended(
        exit_code=facts.get("exit-code"),
        error=facts.get("error"),
        cpu_s=max(cpu_s, observed.cpu_s),
        max_rss_mb=max(max_rss_kb, observed.max_rss_kb) / 1024,
        memory=stopped_by == "memory" or (box.group is not None and cgroups.oom_kills(box.group) > oom_kills),
    )


def _ended(
    *,
    exit_code: int | None = None,
    error: str | None = None,
    cpu_s: float = 0.0,
    max_rss_mb: float = 0.0,
    memory: bool = False,
) -> dict[str, Any]:
    """The message. `memory`: there was too little, and something was killed for it."""
    # A command may attach to bwrap's process in its namespace and make it report any number.
    exit_code = exit_code if exit_code is None else exit_code & 0xFF
    return {
        "op": "ended",
        "exit_code": exit_code,
        "error": error,
        "cpu_s": cpu_s,
        "max_rss_mb": max_rss_mb,
        "memory": memory,
    }


def _become_bwrap(box: Box, message: dict[str, Any], stdout: int, stderr: int, status: int, keeper: int) -> None:
    """In the forked child: never returns."""
    try:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        seccomp = os.open(box.seccomp, os.O_RDONLY)
        _inherit_only({0, 1, 2, status, seccomp})
        # Ignoring is inherited: Python ignores two signals, nohup a third, and a run must not depend on how it was started.
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")  # when the host runs out of memory, the kernel takes a sandbox, not the trainer
        if box.host_uid is not None:
            os.setgroups([])
            os.setresgid(box.host_uid, box.host_uid, box.host_uid)
            os.setresuid(box.host_uid, box.host_uid, box.host_uid)
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() == keeper:
            os.execve(box.bwrap, bwrap_arguments(box, message, status, seccomp), _OUTSIDE_ENVIRONMENT)
    except BaseException as error:  # noqa: BLE001 - the process ends here, and the keeper is told why
        os.write(status, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    finally:
        os._exit(1)


def _inherit_only(descriptors: set[int]) -> None:
    """Whatever else is open, a socket to the trainer above all, closes when bwrap starts."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            os.set_inheritable(int(name), int(name) in descriptors)


def bwrap_arguments(box: Box, message: dict[str, Any], status: int, seccomp: int) -> list[str]:
    """The whole command line. Limits are set by prlimit inside: they are the command's, and not bwrap's own."""
    environment = [word for name, value in message["env"].items() for word in ("--setenv", name, value)]
    return [
        *(box.bwrap, "--json-status-fd", str(status)),
        *_ISOLATION,
        *(("--disable-userns",) if box.can_disable_userns else ()),
        *(("--seccomp", str(seccomp)) if os.fstat(seccomp).st_size else ()),
        *environment,
        *("--ro-bind", box.root, "/"),
        *("--dev", "/dev", "--bind", f"{box.disk}/shm", "/dev/shm", "--remount-ro", "/dev"),
        *("--proc", "/proc"),
        *("--bind", f"{box.disk}/tmp", "/tmp", "--bind", f"{box.disk}/work", "/work", "--chdir", "/work"),
        *("--", "/usr/bin/prlimit", *_limit_options(message["limits"])),
        *("--", *message["argv"]),
    ]


def _limit_options(limits: dict[str, list[int]]) -> list[str]:
    """For prlimit. Nothing may be raised above what this process itself has as its hard limit."""
    options = []
    for name, wanted in limits.items():
        _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        soft, top = (value if hard == resource.RLIM_INFINITY else min(value, hard) for value in wanted)
        options.append(f"--{name}={soft}:{top}")
    return options


def _wait(connection: socket.socket, box: Box, monitor: int, status: int, oom_kills: int) -> tuple[bytes, str | None]:
    """Until bwrap has ended or must. Tells the trainer once the command's processes exist.

    Returns bwrap's status lines so far and what stopped it: "trainer", "memory", or None when it ended by itself.
    """
    poll = select.poll()
    for descriptor in (connection.fileno(), monitor, status):
        poll.register(descriptor, select.POLLIN)
    lines = b""
    while True:
        ready = {descriptor for descriptor, _ in poll.poll(_WATCH_MS)}
        if status in ready:
            chunk = os.read(status, 4096)
            if not lines and chunk:
                wire.send(connection, {"op": "started"})
            if not chunk:
                poll.unregister(status)
            lines += chunk
        if monitor in ready:
            return lines, None
        if connection.fileno() in ready:
            wire.receive(connection)  # `kill`, or the trainer is gone, which the keeper's loop sees next
            return lines, "trainer"
        if not ready and _is_over_memory(box, lines, oom_kills):
            return lines, "memory"


def _is_over_memory(box: Box, lines: bytes, oom_kills: int) -> bool:
    if box.group is not None and cgroups.limits_memory(box.group):
        return cgroups.oom_kills(box.group) > oom_kills
    init = _facts(lines).get("child-pid")
    # Pages that forked processes still share are counted once for each: hence twice the limit.
    return init is not None and observe(init).anonymous_bytes > 2 * box.memory_bytes


def _end_all(child: int) -> tuple[float, int]:
    """Kills bwrap and all that it started; returns their CPU seconds and largest resident set [KiB].

    bwrap's end orphans the first process of the command's pid namespace to this process (a subreaper). That one can be
    waited for only after the kernel has killed and collected everything in its namespace: so nothing is left.
    """
    cpu_s, max_rss_kb = 0.0, 0
    pending = [child]
    while True:
        for pid in pending:
            os.kill(pid, signal.SIGKILL)
        try:
            _, _, usage = os.wait4(-1, 0)
        except ChildProcessError:
            return cpu_s, max_rss_kb
        cpu_s += usage.ru_utime + usage.ru_stime
        max_rss_kb = max(max_rss_kb, usage.ru_maxrss)
        with open("/proc/thread-self/children", encoding="ascii") as file:
            pending = [int(pid) for pid in file.read().split()]


def _drain(status: int) -> bytes:
    data = b""
    while chunk := os.read(status, 4096):
        data += chunk
    return data


def _facts(lines: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in lines.split(b"\n")[:-1]:
        facts.update(json.loads(line))
    return facts
