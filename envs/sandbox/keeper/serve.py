"""A keeper: holds one sandbox's work directory, and runs its commands, one at a time.

consumes: one request that makes it somebody's; then `exec` (with the write ends of stdout and stderr) and `kill`
waits for: its sockets, and, during a command, the bwrap process
unblocked by: a message; the command's end; the end of the trainer's side, which ends everything
produces: `started` and `ended` messages; nothing of a command is alive once `ended` is sent. Its control group is the
zygote's to remove
"""

from __future__ import annotations

import os
import signal
import socket
import traceback
from typing import Any

from . import cgroups, kernel, rootfs, wire
from .box import Box, Options
from .command import run

_ROOT_BYTES = 1 << 30
"""Bounds mistakes only: nothing but the trainer writes there."""
_OWN_BYTES = 32 << 20
_NUM_OWN_PROCESSES = 4
"""In a sandbox's control group, beside the command: the keeper, and bwrap outside and inside its namespaces."""


def keep(line: socket.socket, options: Options, stage: str, uid: int | None, group: cgroups.Group | None) -> None:
    """The life of a keeper: prepares itself, waits on `line` (to the zygote) for its request, and serves it."""
    error = None
    try:
        _prepare(stage, group)
    except OSError:
        error = traceback.format_exc(limit=-3)
    request, descriptors = wire.receive(line)
    if request is None:
        return
    with socket.socket(fileno=descriptors[0]) as connection:
        if error is None:
            try:
                box = _equip(request, options, stage, uid, group)
            except OSError:
                error = traceback.format_exc(limit=-3)
        if error is not None:
            wire.send(connection, {"error": error})
            return
        _serve(connection, box)


def _prepare(stage: str, group: cgroups.Group | None) -> None:
    """All that takes time and is the same for every sandbox."""
    kernel.die_with_parent(signal.SIGKILL)
    kernel.become_subreaper()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount_tmpfs(f"{stage}/root", _ROOT_BYTES, _ROOT_BYTES >> 12)
    rootfs.build_root(f"{stage}/base", f"{stage}/root")
    if group is not None:
        cgroups.create(group)


def _equip(request: dict[str, Any], options: Options, stage: str, uid: int | None, group: cgroups.Group | None) -> Box:
    """Makes the keeper one sandbox's. `request` is made by `envs.sandbox.bubblewrap`."""
    disk = f"{stage}/disk"
    kernel.mount_tmpfs(disk, request["disk_bytes"], request["num_inodes"])
    for name, mode in (("work", 0o755), ("tmp", 0o1777), ("shm", 0o1777)):
        os.mkdir(f"{disk}/{name}")
        os.chmod(f"{disk}/{name}", mode)
        if uid is not None:
            os.chown(f"{disk}/{name}", uid, uid)
    if group is not None:
        cgroups.limit(group, request["memory_bytes"] + _OWN_BYTES, request["num_processes"] + _NUM_OWN_PROCESSES)
    return Box(
        bwrap=options.bwrap,
        can_disable_userns=options.can_disable_userns,
        root=f"{stage}/root",
        disk=disk,
        seccomp=f"{stage}/seccomp",
        host_uid=uid,
        group=group,
        memory_bytes=request["memory_bytes"],
    )


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
