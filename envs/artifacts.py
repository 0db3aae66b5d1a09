"""What leaves a sandbox for the verifier: the policy's files, within bounds, apart from what the environment recorded.

Layout: each regular file of the work directory is `work/<path>`; what the environment itself recorded (a command's
stdout, say) stands beside it under a name without a slash, which no file of the policy can take. Files that break a
bound are left out, and `left_out` (JSON, a list of sentences) says so; a verifier that wants a complete tree refuses
such a hand-in.
"""

from __future__ import annotations

import json

from envs.tool_calls import is_text
from postrl.contracts import Files, Sandbox

WORK = "work/"
LEFT_OUT = "left_out"
MAX_FILES = 64
MAX_TOTAL_BYTES = 1 << 20
MAX_PATH_BYTES = 200
"""A verifier's sandbox must be able to hold the paths below its own work directory: a policy that could make it fail
would turn a wrong answer into a fault of ours, which is not counted."""
MAX_DEPTH = 8
_MAX_REASONS = 8


def collect(sandbox: Sandbox, recorded: Files) -> dict[str, bytes]:
    """The artifacts of an episode. `recorded` is what the environment adds, by names without a slash.

    Deterministic: files are taken in the order of their paths until 64 files or 1 MiB are reached.
    """
    assert not any("/" in name or name == LEFT_OUT for name in recorded), f"reserved names: {sorted(recorded)}"
    artifacts = dict(recorded)
    reasons: list[str] = []
    budget = MAX_TOTAL_BYTES
    num_files = 0
    for path in sandbox.list():
        data, reason = _take(sandbox, path, budget) if num_files < MAX_FILES else (None, f"over {MAX_FILES} files")
        if data is None:
            reasons.append(f"{ascii(path)[:80]}: {reason}")
            continue
        artifacts[WORK + path] = data
        num_files += 1
        budget -= len(data)
    if reasons:
        artifacts[LEFT_OUT] = json.dumps([f"{len(reasons)} files left out", *reasons[:_MAX_REASONS]]).encode()
    return artifacts


def _take(sandbox: Sandbox, path: str, budget: int) -> tuple[bytes | None, str]:
    if not is_text(path):
        return None, "the name is not UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES or path.count("/") >= MAX_DEPTH:
        return None, f"the path is longer than {MAX_PATH_BYTES} bytes or deeper than {MAX_DEPTH}"
    try:
        data = sandbox.get(path, max_bytes=budget + 1)
    except (FileNotFoundError, PermissionError) as error:
        return None, f"unreadable ({type(error).__name__})"
    if len(data) > budget:
        return None, f"over {MAX_TOTAL_BYTES} bytes in all"
    return data, ""
