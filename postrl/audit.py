"""A run that audits itself: each invariant it relies on is checked, with the evidence on disk, and a broken one stops it.

`audit.json`: {"status", "checks": [{"name", "status", "sentence", "evidence", "step"}]}. A check that is repeated every step
keeps one entry, the last; a failed one raises `AuditFailure`, whose text says what is wrong and what to try.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class AuditFailure(RuntimeError):
    """An invariant does not hold. The run stops; nothing that it would have learned from here on could be trusted."""


class Audit:
    def __init__(self, path: Path):
        self._path = path
        self._checks: dict[str, dict[str, Any]] = {}
        if path.exists():  # a resumed run keeps what was proved before
            recorded = json.loads(path.read_text())["checks"]
            self._checks = {c["name"]: c for c in recorded if c["status"] == "passed"}

    def check(self, name: str, holds: bool, sentence: str, *, step: int | None = None, **evidence: Any) -> None:
        """Records a check. `sentence` says what holds when it passes, or what is wrong and what to try when it fails.

        Raises AuditFailure when it doesn't hold.
        """
        status = "passed" if holds else "failed"
        entry = {"name": name, "status": status, "sentence": sentence, "evidence": evidence, "step": step}
        self._checks.pop(name, None)
        self._checks[name] = entry
        self._write("running" if holds else "failed")
        if not holds:
            raise AuditFailure(f"{name}: {sentence} Evidence: {json.dumps(evidence, default=str)}")

    def evidence(self, name: str) -> dict[str, Any]:
        """The evidence of a check that passed, in this start or an earlier one; empty when it was never made."""
        return self._checks.get(name, {"evidence": {}})["evidence"]

    def passed(self) -> str:
        """Declares the run's audit complete."""
        self._write("passed")
        return "passed"

    def _write(self, status: str) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        partial.write_text(json.dumps({"status": status, "checks": list(self._checks.values())}, indent=1, default=str))
        partial.replace(self._path)
