"""The process from which every keeper of one factory is forked: its namespaces and what they share.

Run: python3 -I -S -c "..." FOLDER CONTROL_FD TRAINER_PID OPTIONS_JSON (see `envs.sandbox.zygote_process`).
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

from . import kernel, rootfs, seccomp, wire
from .box import Options
from .nursery import Nursery

_STAGES = ("/mnt", "/srv", "/media", "/opt", "/tmp")
"""Where the staging tmpfs is mounted, in the zygote's own mount namespace: the host's directory there is untouched."""
_STAGE_BYTES = 64 << 20
_SANDBOX_UID_SPAN = 1 << 28
_SANDBOX_UID_BASE = 0x60000000


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[2]))
    trainer_pid = int(sys.argv[3])
    options = Options(**json.loads(sys.argv[4]))
    os.umask(0o022)
    os.set_inheritable(control.fileno(), False)
    trainer = os.pidfd_open(trainer_pid)
    if os.getppid() != trainer_pid:
        return
    try:
        drops_uid = _enter_namespaces()
    except OSError as error:
        wire.send(control, {"error": str(error)})
        return
    child = os.fork()
    if child:
        control.close()
        os.waitpid(child, 0)
        return
    kernel.die_with_parent(signal.SIGKILL)
    try:
        stage = _stage(options)
    except OSError as error:
        wire.send(control, {"error": str(error)})
        return
    gc.freeze()  # keepers share these pages for as long as nobody writes to them
    wire.send(control, {"drops_uid": drops_uid})
    Nursery(control, trainer, options, stage, _uids(trainer_pid) if drops_uid else None).run()


def _enter_namespaces() -> bool:
    """New mount and pid namespaces; in a user namespace where root isn't there to make them.

    Returns whether commands can run under host users of their own, which takes root with a wide range of mapped users.
    """
    uid, gid = os.geteuid(), os.getegid()
    drops_uid = False
    try:
        kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
        drops_uid = uid == 0 and _is_mapped(_SANDBOX_UID_BASE, _SANDBOX_UID_SPAN)
    except PermissionError:
        kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWPID)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    return drops_uid


def _is_mapped(first: int, num: int) -> bool:
    with open("/proc/self/uid_map", encoding="ascii") as file:
        extents = [tuple(map(int, line.split())) for line in file]
    return any(inside <= first and first + num <= inside + length for inside, _, length in extents)


def _uids(trainer_pid: int) -> range:
    """Host users for the commands of this trainer's sandboxes, far from any real one; 1,024 a trainer, used in turn."""
    start = _SANDBOX_UID_BASE + (trainer_pid % (_SANDBOX_UID_SPAN >> 10)) * 1024
    return range(start, start + 1024)


def _stage(options: Options) -> str:
    """Mounts the staging tmpfs and lays out the shared part of every sandbox's root in it."""
    # Its pid namespace's own /proc: bwrap and the keepers must see the pids that they use.
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    needed = (options.python_prefix, options.bwrap, sys.base_prefix, sys.executable, __file__)
    for stage in _STAGES:
        if os.path.isdir(stage) and not any(path.startswith(f"{stage}/") for path in needed):
            break
    else:
        raise OSError(f"each of {_STAGES} is missing, or holds something that sandboxes need: {needed}")
    kernel.mount_tmpfs(stage, _STAGE_BYTES, 16_384)
    for name in ("base", "root", "disk"):
        os.mkdir(f"{stage}/{name}")
    rootfs.build_base(f"{stage}/base", options.python_prefix)
    with open(f"{stage}/seccomp", "wb") as file:
        file.write(seccomp.program() or b"")
    return stage
