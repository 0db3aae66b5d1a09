"""Sandboxes: isolated machines in which everything runs that a policy writes.

    from envs.sandbox import default_factory

    with default_factory().create({"a.txt": b"1\\n"}) as sandbox:
        print(sandbox.exec(["cat", "a.txt"]).stdout)

The protocols are `postrl.contracts.Sandbox` and `SandboxFactory`. The backend of this version is bubblewrap
(`bubblewrap.py`). Where it can't work `SandboxUnavailable` says why: there is no fallback that would run a policy's
program outside.
"""

from __future__ import annotations

import threading

from envs.sandbox.availability import SandboxUnavailable
from envs.sandbox.box import PutRefused
from envs.sandbox.bubblewrap import BubblewrapFactory

__all__ = ["BubblewrapFactory", "PutRefused", "SandboxUnavailable", "default_factory"]

_lock = threading.Lock()
_factory: BubblewrapFactory | None = None


def default_factory() -> BubblewrapFactory:
    """The factory that this process shares, made at the first call. Raises SandboxUnavailable."""
    global _factory
    with _lock:
        if _factory is None:
            _factory = BubblewrapFactory()
        return _factory
