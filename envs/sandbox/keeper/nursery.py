"""The zygote's loop: has keepers ready, gives them away, buries them.

consumes: requests on the control socket, each with the keeper's end of a socket pair
waits for: the control socket, the trainer's pid handle, and each keeper's
unblocked by: a request; the end of a keeper, of the trainer, or of its factory
produces: a keeper for each request, prepared beforehand where there was time; at its own end it ends them all
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import cgroups, wire
from .box import Options
from .serve import keep

_NUM_SPARES = 2
"""Preparing takes some 15 ms where there are control groups, most of it waiting for the kernel."""
_BREED_AFTER_MS = 20
"""of quiet: the first command of the sandbox that was just given away goes first."""
_GRACE_S = 5.0
"""At the end keepers see their sockets close and tidy up. After that time the kernel kills who is left."""


@dataclass(frozen=True)
class _Keeper:
    pid: int
    line: socket.socket
    """Leads to it, until it is somebody's."""
    group: cgroups.Group | None
    connection: socket.socket | None = None
    """Its end of the trainer's socket, held open until nothing is left of the sandbox: the trainer waits for that."""

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (self.line,) if self.connection is None else (self.line, self.connection)


class Nursery:
    """All keepers of a zygote. `trainer` is a pid handle; `uids` are the host's users that commands run under, used in
    turn, or None: then all run as this process does."""

    def __init__(self, control: socket.socket, trainer: int, options: Options, stage: str, uids: Sequence[int] | None):
        self._control = control
        self._trainer = trainer
        self._options = options
        self._stage = stage
        self._uids = uids
        self._keepers: dict[int, _Keeper] = {}
        """By pid handle."""
        self._spares: list[int] = []
        self._can_breed = True
        self._num_born = 0
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(trainer, select.POLLIN)

    def run(self) -> None:
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # three a sandbox
        while True:
            lacks_spares = self._can_breed and len(self._spares) < _NUM_SPARES
            ready = {descriptor for descriptor, _ in self._poll.poll(_BREED_AFTER_MS if lacks_spares else None)}
            for handle in ready & self._keepers.keys():
                self._bury(handle)
            if self._trainer in ready:
                break
            if self._control.fileno() in ready:
                request, descriptors = wire.receive(self._control)
                if request is None:
                    break
                self._give(request, socket.socket(fileno=descriptors[0]))
            elif not ready:
                self._breed_spare()
        self._end()

    def _give(self, request: dict[str, Any], connection: socket.socket) -> None:
        """Makes a keeper the one at the other end of `connection`."""
        self._can_breed = True
        try:
            handle = self._spares.pop(0) if self._spares else self._breed()
            wire.send(self._keepers[handle].line, request, [connection.fileno()])
            self._keepers[handle] = replace(self._keepers[handle], connection=connection)
        except OSError as error:
            with contextlib.suppress(OSError):
                wire.send(connection, {"error": f"{type(error).__name__}: {error}"})
            connection.close()

    def _breed_spare(self) -> None:
        try:
            self._spares.append(self._breed())
        except OSError:
            self._can_breed = False  # the next request tries again, and reports what is wrong

    def _breed(self) -> int:
        """Forks a keeper and returns its pid handle."""
        number = self._num_born
        self._num_born += 1
        uid = self._uids[number % len(self._uids)] if self._uids else None
        group = cgroups.group_of(self._options.cgroups, f"{self._options.group_name}-{number}")
        ours, theirs = socket.socketpair()
        with theirs:
            child = os.fork()
            if child == 0:
                others = [ours, self._control, *(one for keeper in self._keepers.values() for one in keeper.sockets)]
                _become_keeper(others, theirs, self._options, self._stage, uid, group)
        handle = os.pidfd_open(child)
        self._keepers[handle] = _Keeper(child, ours, group)
        self._poll.register(handle, select.POLLIN)
        return handle

    def _bury(self, handle: int) -> None:
        """Collects a keeper that has ended, orphans of one that crashed, and its control group."""
        self._poll.unregister(handle)
        os.close(handle)
        keeper = self._keepers.pop(handle)
        if handle in self._spares:
            self._spares.remove(handle)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(keeper.pid, 0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0] > 0:
                pass
        if keeper.group is not None:
            try:
                cgroups.remove(keeper.group)
            except OSError as error:
                print(f"postrl: a control group stays until the next start: {error}", file=sys.stderr)
        for one in keeper.sockets:
            one.close()

    def _end(self) -> None:
        for keeper in self._keepers.values():
            for one in keeper.sockets:
                with contextlib.suppress(OSError):  # the other end is gone
                    one.shutdown(socket.SHUT_RDWR)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
        for handle in list(self._keepers):
            self._bury(handle)


def _become_keeper(
    others: Iterable[socket.socket],
    line: socket.socket,
    options: Options,
    stage: str,
    uid: int | None,
    group: cgroups.Group | None,
) -> None:
    """In the forked child: never returns. `others` are sockets that must not stay open here."""
    try:
        for other in others:
            other.close()
        keep(line, options, stage, uid, group)
    except BaseException:  # noqa: BLE001 - the process ends here, which its trainer sees
        traceback.print_exc()
    finally:
        os._exit(0)
