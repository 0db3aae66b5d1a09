"""The trainer's end of the zygote: starts it, asks it for keepers, ends it. What it is: `envs.sandbox.keeper`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from envs.sandbox.keeper import wire
from envs.sandbox.keeper.box import Options
from postrl.contracts import InfraError

_FOLDER = Path(__file__).resolve().parent
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); import keeper.zygote as zygote; zygote.main()"
_START_TIMEOUT_S = 60.0


class ZygoteProcess:
    """One running zygote. Thread-safe. Raises InfraError from the constructor when it can't start."""

    def __init__(self, options: Options):
        ours, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._control = ours
        arguments = [str(_FOLDER), str(theirs.fileno()), str(os.getpid()), json.dumps(asdict(options))]
        # A session of its own: Ctrl-C must reach the trainer alone, which then closes its sandboxes.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={"LC_ALL": "C.UTF-8"},
            cwd="/",
        )
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, ours, self._process, os.getpid())
        hello: dict[str, Any] | None
        try:
            ours.settimeout(_START_TIMEOUT_S)
            hello, _ = wire.receive(ours)
            ours.settimeout(None)
        except TimeoutError:
            hello = {"error": f"the zygote did not answer in {_START_TIMEOUT_S:g} s"}
        if hello is None or "error" in hello:
            self.close()
            raise InfraError(hello["error"] if hello else f"the zygote ended with status {self._process.returncode}")
        self.drops_uid: bool = hello["drops_uid"]

    def connect(self, request: dict[str, Any]) -> socket.socket:
        """Has a keeper forked; returns the socket that leads to it. Raises OSError when the zygote is gone."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                wire.send(self._control, request, [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the zygote and with it every sandbox of it. May be called twice."""
        self._finalizer()


def _end(control: socket.socket, process: subprocess.Popen[bytes], owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child must not end what its parent uses
        with contextlib.suppress(OSError):
            # Not just closed: forked children may hold copies of this socket.
            control.shutdown(socket.SHUT_RDWR)
        process.wait()
    control.close()
