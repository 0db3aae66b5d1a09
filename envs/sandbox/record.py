"""From a command's result to its line in the episode's log."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from postrl.contracts import CommandRecord, ExecResult

_EXCERPT_CHARS = 500


def recorded(argv: Sequence[str], result: ExecResult) -> CommandRecord:
    """Digests are SHA-256 (hex) of the bytes that were kept; excerpts are at most 500 characters of them."""
    return CommandRecord(
        argv=tuple(argv),
        exit_code=result.exit_code,
        wall_s=result.wall_s,
        cpu_s=result.cpu_s,
        max_rss_mb=result.max_rss_mb,
        stdout_digest=hashlib.sha256(result.stdout).hexdigest(),
        stderr_digest=hashlib.sha256(result.stderr).hexdigest(),
        stdout_excerpt=_excerpt(result.stdout),
        stderr_excerpt=_excerpt(result.stderr),
        killed_by=result.killed_by,
    )


def _excerpt(data: bytes) -> str:
    return data[: 4 * _EXCERPT_CHARS].decode(errors="replace")[:_EXCERPT_CHARS]
