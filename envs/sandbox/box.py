"""One bubblewrap sandbox as its user sees it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence

from envs.sandbox import paths
from envs.sandbox.command import execute
from envs.sandbox.record import recorded
from postrl.contracts import CommandRecord, ExecResult, InfraError, PolicyError, Resources

ENVIRONMENT = {
    "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "USER": "user",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Every variable of a command, apart from those that its caller adds (and PWD)."""
_END_TIMEOUT_S = 60.0
_POLICYS_ERRORS = {errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.EACCES, errno.ENOSPC, errno.ENAMETOOLONG}


class PutRefused(PolicyError, OSError):
    """The policy's own doing keeps a file from being written; `errno` says what.

    ENOTDIR or ELOOP: a file or a link stands among the parents; EISDIR: a directory in its place; EACCES: a directory
    is closed by its mode; ENOSPC: the disk is full; ENAMETOOLONG. Unless the environment turns it into an observation,
    the episode ends as a `PolicyFault`.
    """


class BubblewrapSandbox:
    """See `postrl.contracts.Sandbox`. Thread-safe: commands and file operations take turns, `close` interrupts.

    Exit codes are a shell's: 126 can't be executed, 127 not found, 128 + n ended by signal n.
    """

    def __init__(self, connection: socket.socket, work: int, resources: Resources, host_uid: int | None):
        self._connection = connection
        self._work = work
        self._resources = resources
        self._host_uid = host_uid
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._commands: list[CommandRecord] = []
        self._closed = False
        self._lost: str | None = None
        self._finalizer = weakref.finalize(self, _release, connection, work)

    @property
    def commands(self) -> tuple[CommandRecord, ...]:
        return tuple(self._commands)

    def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Runs one command to its end; `env` comes on top of `ENVIRONMENT`.

        Background processes end with the command. An `argv` that no kernel would take (too long, a NUL byte) gives exit
        code 126. Raises ValueError for an empty `argv`, a bare string, a timeout that isn't positive or a malformed
        variable; InfraError when the sandbox fails.
        """
        timeout_s = self._resources.timeout_s if timeout_s is None else timeout_s
        if isinstance(argv, str) or not argv:
            raise ValueError(
                f"argv is {argv!r}; expected the program and its arguments, such as ['bash', '-c', script]"
            )
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; expected a positive number of seconds")
        environment = {**ENVIRONMENT, **(env or {})}
        for name, value in environment.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"environment variable {name!r}: {value!r} can't be passed to a program")
        with self._lock:
            self._require_open()
            try:
                result = execute(self._connection, argv, environment, timeout_s, self._resources)
            except (OSError, InfraError) as error:
                self._lost = "it was closed" if self._closed else str(error)
                raise InfraError(f"sandbox lost while it ran {argv[0]!r}: {self._lost}") from error
            except BaseException:
                self._lost = f"the thread that ran {argv[0]!r} in it was interrupted"
                raise
            self._commands.append(recorded(argv, result))
        return result

    def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """See `Sandbox.put`. A link, pipe or file at `path` is replaced.

        Raises ValueError for a malformed path, and PutRefused when what the policy has done is in the way.
        """
        with self._lock:
            self._require_open()
            try:
                paths.write(self._work, path, data, mode, self._host_uid)
            except OSError as error:
                if error.errno in _POLICYS_ERRORS:
                    raise PutRefused(error.errno, os.strerror(error.errno), path) from error
                raise InfraError(f"{path!r} could not be written to a sandbox: {error}") from error

    def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """The first `max_bytes` bytes: ask for one more than you accept to notice a longer file.

        Raises FileNotFoundError unless a regular file is there, reached without links, PermissionError when its owner
        may not read it, ValueError for a malformed path.
        """
        with self._lock:
            self._require_open()
            return paths.read(self._work, path, max_bytes)

    def list(self) -> tuple[str, ...]:
        """See `Sandbox.list`. Names that aren't UTF-8 and directories that their owner may not list are left out."""
        with self._lock:
            self._require_open()
            return tuple(sorted(paths.walk(self._work)))

    def close(self) -> None:
        """Ends a running command, and returns when every process and file is gone."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with contextlib.suppress(OSError):  # not connected: the keeper is gone already
            self._connection.shutdown(socket.SHUT_WR)
        with self._lock:
            try:
                self._connection.settimeout(_END_TIMEOUT_S)
                while self._connection.recv(4096):
                    pass
            except TimeoutError as error:
                raise InfraError(f"a sandbox is still there {_END_TIMEOUT_S:g} s after it was told to end") from error
            except OSError:  # reset: the zygote is gone, and everything with it
                pass
            finally:
                self._finalizer()

    def __enter__(self) -> BubblewrapSandbox:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("this sandbox is closed")
        if self._lost is not None:
            raise InfraError(f"this sandbox was lost earlier: {self._lost}")


def _release(connection: socket.socket, work: int) -> None:
    connection.close()
    os.close(work)
