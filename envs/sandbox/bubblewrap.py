"""Sandboxes made by bubblewrap: Linux namespaces, no daemon, with and without root.

    factory = BubblewrapFactory()
    with factory.create({"notes.txt": b"3 apples\\n"}) as sandbox:
        result = sandbox.exec(["bash", "-c", "grep -c apples notes.txt"])      # result.stdout == b"1\\n"

Each command gets fresh user, pid, mount, network, ipc, uts and cgroup namespaces; files in /work and /tmp stay from one
command to the next, processes don't. What a command sees: `keeper/rootfs.py`; how it is started and ended: `keeper/`.
Environment: `envs.sandbox.box.ENVIRONMENT`, and nothing of the host's. The user is 1000 without capabilities or a way
to get any; HOME is /work, so that `~` and `cd` lead to the task's files.

Limits (`Resources`): wall time by the caller's thread; CPU time, address space, file size, processes by rlimits; disk
by the size of a tmpfs that /work, /tmp and /dev/shm share (bytes, and one file per KiB of it); output by counting what
is read; memory and processes of a whole command by a control group where one can be made, else memory by looking at the
processes every 50 ms. As root every sandbox is a host user of its own. `BubblewrapFactory.describe` says which of these
hold here.

A limit that ends a command is the policy's doing (`killed_by`); a sandbox that can't start, or is lost, raises
InfraError.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from envs.sandbox import paths
from envs.sandbox.availability import (
    PRINT_VERSION,
    SandboxUnavailable,
    can_disable_userns,
    explain,
    find_bwrap,
    find_python,
    require_own_process_count,
    require_prlimit,
)
from envs.sandbox.box import BubblewrapSandbox
from envs.sandbox.keeper import cgroups, seccomp, wire
from envs.sandbox.keeper.box import Options
from envs.sandbox.zygote_process import ZygoteProcess
from postrl.contracts import Files, InfraError, Resources

_START_TIMEOUT_S = 60.0
_MIN_MEMORY_MB = 16
_CALLERS_ERRORS = {errno.ENOSPC, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


class BubblewrapFactory:
    """Makes sandboxes. Thread-safe; one small process of its own stays until `close`, or this process's end.

    `python_prefix`: the Python installation that sandboxes get (its bin/python3 must be >= 3.11); None: the system's if
    new enough, else the one that runs this process. `control_groups`: False leaves memory and processes to rlimits and
    the watch. Raises SandboxUnavailable, which says what to install or to allow, where there can be no sandboxes.
    """

    def __init__(self, *, python_prefix: Path | None = None, control_groups: bool = True):
        require_prlimit()
        prefix, self._python_version = find_python(python_prefix)
        bwrap = find_bwrap()
        self._options = Options(
            bwrap=bwrap,
            can_disable_userns=can_disable_userns(bwrap),
            python_prefix=prefix,
            cgroups=cgroups.detect() if control_groups else {},
            group_name="",
        )
        cgroups.collect_stale(self._options.cgroups)
        self._lock = threading.Lock()
        self._closed = False
        self._start()
        self._prove()

    def create(
        self, files: Files, resources: Resources | None = None, read_only: Mapping[str, Files] | None = None
    ) -> BubblewrapSandbox:
        """See `SandboxFactory.create`. Files have mode 0644 and the same time, 2000-01-01 UTC, on every run.

        Raises ValueError for malformed paths, for files beyond `resources.disk_mb`, and for `read_only` paths that are
        not absolute or lie in a system directory, /work or /tmp.
        """
        resources = resources or Resources()
        _require_usable(resources)
        read_only_files = _flattened(read_only or {})
        connection = self._connect(_request(resources))
        try:
            connection.settimeout(_START_TIMEOUT_S)
            hello, handles = wire.receive(connection)
            connection.settimeout(None)
            if hello is None or "error" in hello:
                raise InfraError(f"no sandbox: {hello['error'] if hello else 'its keeper ended'}")
        except TimeoutError:
            connection.close()
            raise InfraError(f"no sandbox: its keeper did not answer in {_START_TIMEOUT_S:g} s") from None
        except BaseException:
            connection.close()
            raise
        work, root = handles
        sandbox = BubblewrapSandbox(connection, work, resources, hello["uid"])
        try:
            _require_free(root, read_only or {})
            paths.write_all(work, files, hello["uid"])
            paths.write_all(root, read_only_files, None)
        except OSError as error:
            sandbox.close()
            if error.errno in _CALLERS_ERRORS:
                size = sum(map(len, files.values()))
                raise ValueError(
                    f"{len(files)} files of {size} bytes can't be laid out in {resources.disk_mb} MiB: {error}; "
                    "raise Resources.disk_mb, shorten a name, or see whether a path is both a file and a directory"
                ) from error
            raise InfraError(f"no sandbox: its files could not be written: {error}") from error
        except BaseException:
            sandbox.close()
            raise
        finally:
            os.close(root)
        return sandbox

    def __deepcopy__(self, memo: dict[int, object]) -> BubblewrapFactory:
        """Itself: it is a handle on a process. Gymnasium copies an environment's arguments into its spec."""
        return self

    def describe(self) -> dict[str, str]:
        """What enforces each limit on this machine, for a report or a log."""
        grouped = self._options.cgroups
        version = "2" if "unified" in grouped else "1"
        memory = (
            f"cgroup v{version}" if {"memory", "unified"} & set(grouped) else "sum of the processes' pages, every 50 ms"
        )
        processes = f" and cgroup v{version}" if {"pids", "unified"} & set(grouped) else ""
        return {
            "backend": self._options.bwrap,
            "python": f"{self._python_version} of {self._options.python_prefix}",
            "user": "a host user a sandbox" if self._zygote.drops_uid else "the caller's user, in a user namespace",
            "wall time": "the caller's clock",
            "cpu time": "RLIMIT_CPU, for each process",
            "memory": f"RLIMIT_AS, for each process; {memory}, together",
            "processes": f"RLIMIT_NPROC, per user namespace{processes}",
            "file size": "RLIMIT_FSIZE",
            "disk": "size and inodes of a tmpfs",
            "output": "counted and dropped while read",
            "system calls": "seccomp" if seccomp.program() else f"no filter for {os.uname().machine}",
            "user namespaces inside": "none" if self._options.can_disable_userns else "possible (bubblewrap < 0.8)",
            "network": "network namespace without interfaces but lo",
        }

    def close(self) -> None:
        """Ends every sandbox of this factory and its process. May be called twice."""
        with self._lock:
            self._closed = True
            if self._pid == os.getpid():
                self._zygote.close()

    def _start(self) -> None:
        self._pid = os.getpid()
        group_name = f"{cgroups.owner_name(self._pid)}-{secrets.token_hex(4)}"
        try:
            self._zygote = ZygoteProcess(replace(self._options, group_name=group_name))
        except InfraError as error:
            raise SandboxUnavailable(f"no sandbox can be made here: {explain(str(error))}") from error
        try:
            require_own_process_count(self._zygote.drops_uid)
        except SandboxUnavailable:
            self._zygote.close()
            raise

    def _prove(self) -> None:
        try:
            with self.create({}) as sandbox:
                result = sandbox.exec(["python3", *PRINT_VERSION])
        except InfraError as error:
            self.close()
            raise SandboxUnavailable(f"no sandbox can be made here: {explain(str(error))}") from error
        if result.stdout.decode(errors="replace").strip() != self._python_version:
            self.close()
            raise SandboxUnavailable(
                f"Python {self._python_version} of {self._options.python_prefix} doesn't run in a sandbox, "
                f"which answers {result}; pass another python_prefix"
            )

    def _connect(self, request: dict[str, int]) -> socket.socket:
        """A connection to a new keeper; the zygote is replaced when it is gone, or another process's."""
        with self._lock:
            if self._closed:
                raise ValueError("this factory is closed: make another one")
            if self._pid != os.getpid() or not self._zygote.is_alive():
                self._start()
            zygote = self._zygote
        try:
            return zygote.connect(request)
        except OSError as error:
            raise InfraError(f"no sandbox: the process that makes them is gone ({error})") from error


def _require_usable(resources: Resources) -> None:
    for name, least in (("timeout_s", 1e-3), ("cpu_s", 1), ("disk_mb", 1), ("file_mb", 1), ("num_processes", 1)):
        if getattr(resources, name) < least:
            raise ValueError(f"Resources.{name} is {getattr(resources, name)}; expected at least {least}")
    if resources.memory_mb < _MIN_MEMORY_MB or resources.output_bytes < 0:
        raise ValueError(
            f"Resources.memory_mb is {resources.memory_mb} and output_bytes {resources.output_bytes}; expected at "
            f"least {_MIN_MEMORY_MB}, below which no program starts, and 0"
        )


def _request(resources: Resources) -> dict[str, int]:
    """What a keeper needs to know to become the keeper of such a sandbox."""
    disk_bytes = resources.disk_mb << 20
    return {
        "disk_bytes": disk_bytes,
        "num_inodes": disk_bytes >> 10,
        "memory_bytes": (resources.memory_mb << 20) + disk_bytes,
        "num_processes": resources.num_processes,
    }


def _flattened(read_only: Mapping[str, Files]) -> dict[str, bytes]:
    """Files below the sandbox's root directory, by relative path."""
    return {f"{top.strip('/')}/{path}": data for top, files in read_only.items() for path, data in files.items()}


def _require_free(root: int, places: Iterable[str]) -> None:
    """What exists in a sandbox's root directory from the start belongs to all sandboxes, or is mounted over."""
    taken = set(os.listdir(root))
    for place in places:
        if not place.startswith("/") or place.split("/")[1] in {"", *taken}:
            raise ValueError(
                f"read_only path {place!r}: expected an absolute path outside of {', '.join(sorted(taken))}, "
                "such as '/verify'"
            )
