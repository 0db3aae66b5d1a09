"""From a task's domain to its verifier."""

from __future__ import annotations

import functools
import importlib
from types import MappingProxyType

from postrl.contracts import Files, SandboxFactory, Task, Verdict, Verifier

VERIFIERS = MappingProxyType(
    {
        "shell": "verifiers.shell:verify",
        "code_repair": "verifiers.code_repair:verify",
        "filing_fields": "verifiers.filing_fields:verify",
    }
)
"""Domain -> where its verifier is. Frozen: a verifier can't be replaced at run time."""


def verify(task: Task, artifacts: Files, sandboxes: SandboxFactory) -> Verdict:
    """Judges a finished episode; see `postrl.contracts.Verifier`. Raises ValueError for a domain without a verifier."""
    return _load(task.domain)(task, artifacts, sandboxes)


@functools.cache
def _load(domain: str) -> Verifier:
    if domain not in VERIFIERS:
        raise ValueError(f"no verifier for the domain {domain!r}; expected one of {', '.join(VERIFIERS)}")
    module, _, name = VERIFIERS[domain].partition(":")
    return getattr(importlib.import_module(module), name)
