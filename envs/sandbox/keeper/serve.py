"""A keeper: holds one sandbox's work directory, and runs its commands, one at a time.

consumes: `exec` (with the write ends of stdout and stderr) and `kill` messages of the trainer
waits for: its socket, and, during a command, the bwrap process
unblocked by: a message; the command's end; the end of the trainer's side, which ends everything
produces: `started` and `ended` messages; nothing of a command is alive once `ended` is sent; its control group is the
zygote's to remove
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

from . import cgroups, kernel, rootfs, wire
from .command import run

_OWN_BYTES = 32 << 20
_NUM_OWN_PROCESSES = 4
"""In a sandbox's control group, beside the command: the keeper, and bwrap outside and inside the command's
namespaces."""


@dataclass(frozen=True)
class Options:
    """What is the same for all sandboxes of a factory."""

    bwrap: str
    python_prefix: str
    cgroups: dict[str, str]
    """See `cgroups.detect`; empty: none can be used."""


@dataclass(frozen=True)
class Box:
    """One sandbox, as its keeper knows it."""

    bwrap: str
    root: str
    disk: str
    seccomp: str
    """File that holds the filter of system calls; empty where there is none for this machine."""
    host_uid: int | None
    """The host's user for commands; None: the keeper's own, inside its user namespace."""
    group: cgroups.Group | None
    memory_bytes: int
    """What all processes of a command may use together."""


def keep(connection: socket.socket, message: dict[str, Any], options: Options, stage: str, uid: int | None) -> None:
    """The life of a keeper. `message` is the request made by `envs.sandbox.bubblewrap`."""
    kernel.die_with_parent(signal.SIGKILL)
    kernel.become_subreaper()
    kernel.unshare(kernel.CLONE_NEWNS)
    root, disk = f"{stage}/root", f"{stage}/disk"
    kernel.mount_tmpfs(root, message["read_only_bytes"] + (1 << 20), message["read_only_inodes"] + 256)
    rootfs.build_root(f"{stage}/base", root)
    kernel.mount_tmpfs(disk, message["disk_bytes"], message["num_inodes"])
    for name, mode in (("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(f"{disk}/{name}")
        os.chmod(f"{disk}/{name}", mode)
        if uid is not None:
            os.chown(f"{disk}/{name}", uid, uid)
    group = cgroups.group_of(options.cgroups, message["name"])
    if group is not None:
        cgroups.create(group, message["memory_bytes"] + _OWN_BYTES, message["num_processes"] + _NUM_OWN_PROCESSES)
    _serve(connection, Box(options.bwrap, root, disk, f"{stage}/seccomp", uid, group, message["memory_bytes"]))


def _serve(connection: socket.socket, box: Box) -> None:
    handles = [
        os.open(f"{box.disk}/work", os.O_RDONLY | os.O_DIRECTORY),
        os.open(box.root, os.O_RDONLY | os.O_DIRECTORY),
    ]
    wire.send(connection, {"uid": box.host_uid}, handles)
    wire.close_all(handles)
    while True:
        message, descriptors = wire.receive(connection)
        if message is None:
            return
        if message["op"] == "exec":
            wire.send(connection, run(connection, box, message, *descriptors))
