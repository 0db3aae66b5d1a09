"""The process from which every keeper of one factory is forked.

consumes: `create` requests on the control socket, each with the keeper's end of a socket pair
waits for: the control socket, and the trainer's pid handle
unblocked by: a request; the end of the trainer, or of its factory
produces: one keeper process a request; its own end kills them all

Run: python3 -I -S -c "..." FOLDER CONTROL_FD TRAINER_PID OPTIONS_JSON (see `envs.sandbox.zygote_process`).
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from . import cgroups, kernel, rootfs, seccomp, wire
from .serve import Options, keep

_STAGES = ("/mnt", "/srv", "/media", "/opt", "/tmp")
"""Where the staging tmpfs is mounted, in the zygote's own mount namespace: the host's directory there is untouched."""
_STAGE_BYTES = 64 << 20
_GRACE_S = 5.0
"""After the trainer's end keepers see their sockets close and tidy up; then the zygote ends and the kernel kills the
rest."""
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
        stage = _stage(options.python_prefix)
    except OSError as error:
        wire.send(control, {"error": str(error)})
        return
    wire.send(control, {"drops_uid": drops_uid})
    _serve(control, trainer, options, stage, _uids(trainer_pid) if drops_uid else None)


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


def _stage(python_prefix: str) -> str:
    """Mounts the staging tmpfs and lays out the shared part of every sandbox's root in it."""
    # Its pid namespace's own /proc: bwrap and the keepers must see the pids that they use.
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    stages = [path for path in _STAGES if os.path.isdir(path) and not f"{python_prefix}/".startswith(f"{path}/")]
    if not stages:
        raise OSError(f"none of {_STAGES} is a directory that the staging tmpfs could cover")
    stage = stages[0]
    kernel.mount_tmpfs(stage, _STAGE_BYTES, 16_384)
    for name in ("base", "root", "disk"):
        os.mkdir(f"{stage}/{name}")
    rootfs.build_base(f"{stage}/base", python_prefix)
    with open(f"{stage}/seccomp", "wb") as file:
        file.write(seccomp.program() or b"")
    return stage


@dataclass(frozen=True)
class _Keeper:
    pid: int
    connection: socket.socket
    """The keeper's end, held open until nothing is left of the sandbox: its closing is what the trainer waits for."""
    group: cgroups.Group | None


def _serve(control: socket.socket, trainer: int, options: Options, stage: str, uids: range | None) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # two a sandbox
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(trainer, select.POLLIN)
    keepers: dict[int, _Keeper] = {}
    num_created = 0
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        for handle in ready & keepers.keys():
            poll.unregister(handle)
            os.close(handle)
            _bury(keepers.pop(handle))
        if trainer in ready:
            break
        if control.fileno() not in ready:
            continue
        message, descriptors = wire.receive(control)
        if message is None:
            break
        connection = socket.socket(fileno=descriptors[0])
        uid = uids[num_created % len(uids)] if uids else None
        num_created += 1
        try:
            child = os.fork()
            if child == 0:
                _become_keeper(
                    (control, *(keeper.connection for keeper in keepers.values())),
                    connection,
                    message,
                    options,
                    stage,
                    uid,
                )
            handle = os.pidfd_open(child)
        except OSError as error:
            wire.send(connection, {"error": f"{type(error).__name__}: {error}"})
            connection.close()
            continue
        keepers[handle] = _Keeper(child, connection, cgroups.group_of(options.cgroups, message["name"]))
        poll.register(handle, select.POLLIN)
    _end(keepers.values())


def _become_keeper(
    others: Iterable[socket.socket],
    connection: socket.socket,
    message: dict[str, Any],
    options: Options,
    stage: str,
    uid: int | None,
) -> None:
    """In the forked child: never returns. `others` are sockets that must not stay open here."""
    status = 1
    try:
        for other in others:
            other.close()
        keep(connection, message, options, stage, uid)
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here, and its trainer is told why
        try:
            wire.send(connection, {"error": traceback.format_exc(limit=-3)})
        except OSError:
            traceback.print_exc()
    finally:
        os._exit(status)


def _bury(keeper: _Keeper) -> None:
    """Collects a keeper that has ended, orphans of one that crashed, and its control group."""
    try:
        os.waitpid(keeper.pid, 0)
        while os.waitpid(-1, os.WNOHANG)[0] > 0:
            pass
    except ChildProcessError:
        pass
    if keeper.group is not None:
        try:
            cgroups.remove(keeper.group)
        except OSError as error:
            print(f"postrl: a control group stays until the next start: {error}", file=sys.stderr)
    keeper.connection.close()


def _end(keepers: Iterable[_Keeper]) -> None:
    """Ends every keeper. They see their sockets close; whoever doesn't in time is killed with this pid namespace."""
    for keeper in keepers:
        keeper.connection.shutdown(socket.SHUT_RDWR)
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
    for keeper in keepers:
        _bury(keeper)
