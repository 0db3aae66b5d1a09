"""Control groups, versions 1 and 2: memory and processes of all commands of one sandbox together.

Optional: where no group can be made, rlimits and the keeper's own look at the processes (`usage.py`) stand alone. A
group is a directory that outlives a crash, so its name carries the owner's pid and start time, and `collect_stale`
removes those of owners that are gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass

PREFIX = "postrl-"
_OWNED = re.compile(PREFIX + r"(?P<namespace>\d+)-(?P<pid>\d+)-(?P<ticks>\d+)-")
_LIMITS = {
    1: {"memory.limit_in_bytes": "memory", "memory.memsw.limit_in_bytes": "memory", "pids.max": "pids"},
    2: {"memory.max": "memory", "memory.swap.max": "none", "pids.max": "pids"},
}
"""By version: files in the order in which they must be written (memsw may not be below the memory limit)."""


@dataclass(frozen=True)
class Group:
    """Directories of one group: one of version 2, or one for each controller of version 1."""

    version: int
    directories: tuple[str, ...]


def detect() -> dict[str, str]:
    """Where groups can be made: `{"unified": parent}`, or `{"memory": parent, "pids": parent}` or one of them, or `{}`.

    A parent of version 2 must hand `memory` and `pids` down to its children already: switching that on would
    concern other people's processes.
    """
    own = _own_paths()
    found: dict[str, str] = {}
    for mount, root, kind, controllers in _mounts():
        wanted = {"memory", "pids"} & controllers
        if kind == "cgroup" and len(wanted) == 1:
            (controller,) = wanted
            parent = _below(mount, root, own.get(controller, "/"))
            if _is_usable(parent):
                found[controller] = parent
        elif kind == "cgroup2":
            parent = _below(mount, root, own.get("", "/"))
            while parent.startswith(mount):
                if {"memory", "pids"} <= set(_read(f"{parent}/cgroup.subtree_control").split()) and _is_usable(parent):
                    return {"unified": parent}
                parent = os.path.dirname(parent)
    return found


def group_of(parents: dict[str, str], name: str) -> Group | None:
    """The group `name` below what `detect` found, made or not; None where none can be made."""
    if not parents:
        return None
    return Group(2 if "unified" in parents else 1, tuple(f"{parent}/{PREFIX}{name}" for parent in parents.values()))


def create(group: Group) -> None:
    """Makes the group and moves the calling process in; what that starts is born there.

    Moving takes milliseconds (the kernel waits for all of its readers), so it is done once a sandbox and not once a
    command.
    """
    for directory in group.directories:
        os.mkdir(directory)
        _write(f"{directory}/cgroup.procs", 0)


def limit(group: Group, memory_bytes: int, num_processes: int) -> None:
    limits = {"memory": memory_bytes, "pids": num_processes, "none": 0}
    for directory in group.directories:
        for name, kind in _LIMITS[group.version].items():
            if os.path.exists(f"{directory}/{name}"):
                _write(f"{directory}/{name}", limits[kind])


def limits_memory(group: Group) -> bool:
    return group.version == 2 or any(os.path.exists(f"{one}/memory.limit_in_bytes") for one in group.directories)


def oom_kills(group: Group) -> int:
    """How many processes of the group the kernel has killed for want of memory."""
    name = "memory.events" if group.version == 2 else "memory.oom_control"
    for directory in group.directories:
        for line in _read(f"{directory}/{name}").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def remove(group: Group) -> None:
    """Kills what is left in the group and removes it. Raises OSError when it can't within 2 s."""
    for directory in group.directories:
        _remove(directory)


def owner_name(pid: int) -> str:
    """Names a process for all time: its pid namespace, its pid there, and its start time in clock ticks since boot."""
    return f"{_pid_namespace()}-{pid}-{_start_ticks(pid)}"


def collect_stale(parents: dict[str, str]) -> list[str]:
    """Removes the groups of owners that are gone, killing what is still in them. Returns the removed directories.

    Owners of other pid namespaces can't be looked up from here: theirs are left alone.
    """
    removed = []
    for parent in parents.values():
        for name in os.listdir(parent):
            match = _OWNED.match(name)
            if match is None or match["namespace"] != _pid_namespace():
                continue
            if str(_start_ticks(int(match["pid"]))) == match["ticks"]:
                continue
            with contextlib.suppress(PermissionError):  # another user's
                _remove(f"{parent}/{name}")
                removed.append(f"{parent}/{name}")
    return removed


def _remove(directory: str) -> None:
    deadline = time.monotonic() + 2.0
    while True:
        for member in _read(f"{directory}/cgroup.procs").split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(member), signal.SIGKILL)
        try:
            os.rmdir(directory)
            return
        except FileNotFoundError:
            return
        except OSError as error:  # busy until the last process has really gone
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _pid_namespace() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)


def _start_ticks(pid: int) -> int | None:
    """None when there is no such process."""
    stat = _read(f"/proc/{pid}/stat")
    return int(stat.rpartition(")")[2].split()[19]) if stat else None


def _own_paths() -> dict[str, str]:
    paths = {}
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _mounts() -> list[tuple[str, str, str, set[str]]]:
    """(mount point, root within the file system, kind, controllers) of every mounted cgroup file system."""
    mounts = []
    for line in _read("/proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, super_options = rest.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, mount = fields.split()[3:5]
            mounts.append((mount, root, kind, set(super_options.split(","))))
    return mounts


def _below(mount: str, root: str, path: str) -> str:
    """The directory of group `path` below a mount that shows the subtree `root`."""
    inside = path.removeprefix(root) if root != "/" and path.startswith(root) else path
    return (mount + "/" + inside.strip("/")).rstrip("/")


def _is_usable(parent: str) -> bool:
    """Whether a group can be made there and joined: both may be somebody else's to allow."""
    probe = f"{parent}/{PREFIX}{owner_name(os.getpid())}-probe"
    try:
        os.mkdir(probe)
    except OSError:
        return False
    joined = subprocess.run(["sh", "-c", 'echo 0 > "$1/cgroup.procs"', "sh", probe], stderr=subprocess.DEVNULL)
    _remove(probe)
    return joined.returncode == 0


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(value))
