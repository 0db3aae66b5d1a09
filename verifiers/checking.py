"""What all verifiers share: one trusted script, run once in a clean sandbox over artifacts that are only data.

    CHECK = load_check("shell", __file__, "shell.py")            # verifiers/checks/shell.py, digest over both files
    report = run_check(CHECK, sandboxes, given={...}, artifacts=artifacts)
    return verdict(CHECK, report)

Inside the sandbox the script (`python3 -I -S /verify/check.py`) finds `/verify/given.json`, which it can't write, and
the artifacts under their names in the work directory. It prints one line of JSON:

    {"nonce": given["nonce"], "parts": {"stdout": 0.0}, "findings": [["stdout", "expected 12, got 13"]]}

with a finding exactly when a part is below 1. Anything else (another shape, more lines, a missing nonce, a non-zero
exit, a limit hit) raises `InfraError`: a verifier that broke has no opinion, and must not look like a wrong answer.

A script must not run what the policy wrote: code in the same sandbox can read `/verify` and reach the script's own file
descriptors, so a report would prove nothing. To judge code, `execute` a script whose `given` holds inputs but no
answers, and take everything it prints as the policy's claim, to be compared outside.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postrl.contracts import ExecResult, Files, Finding, InfraError, Resources, SandboxFactory, Verdict

RESOURCES = Resources(timeout_s=20.0, cpu_s=10, memory_mb=512, disk_mb=16, output_bytes=65_536)
"""Of one verification. The wall time leaves room for a busy machine; a check takes about 30 ms of CPU."""

_MAX_FINDINGS = 32
_MAX_SUBJECT_CHARS = 120
_MAX_MESSAGE_CHARS = 400


@dataclass(frozen=True)
class Check:
    """A check script and the identity of the verifier that it belongs to."""

    script: bytes
    version: str
    """`name@digest8`, over the verifier's source, its script and this module: what changes the judgement changes it."""


@dataclass(frozen=True)
class Report:
    """What a check script found. `parts` are in [0, 1] and not empty."""

    parts: Mapping[str, float]
    findings: tuple[Finding, ...]


def load_check(name: str, verifier_file: str, script: str) -> Check:
    """The script `verifiers/checks/<script>` of the verifier whose source is `verifier_file` (its `__file__`)."""
    source = (Path(__file__).parent / "checks" / script).read_bytes()
    return Check(source, version(name, Path(verifier_file).read_bytes(), source))


def version(name: str, *sources: bytes) -> str:
    """`name@digest8` over this module and `sources`."""
    digest = hashlib.sha256()
    for source in (Path(__file__).read_bytes(), *sources):
        digest.update(hashlib.sha256(source).digest())
    return f"{name}@{digest.hexdigest()[:8]}"


def execute(
    script: bytes,
    sandboxes: SandboxFactory,
    *,
    given: Mapping[str, Any],
    artifacts: Files,
    resources: Resources = RESOURCES,
) -> ExecResult:
    """Runs `script` once in a fresh sandbox; see the module's description for what it finds there.

    `given` must be JSON-like. Raises InfraError when the sandbox can't be made. What the result means is for the caller
    to say.
    """
    verify = {"check.py": script, "given.json": json.dumps(given).encode()}
    with sandboxes.create(artifacts, resources, read_only={"/verify": verify}) as sandbox:
        return sandbox.exec(["python3", "-I", "-S", "/verify/check.py"])


def run_check(
    check: Check,
    sandboxes: SandboxFactory,
    *,
    given: Mapping[str, Any],
    artifacts: Files,
    resources: Resources = RESOURCES,
) -> Report:
    """The report of a trusted script. Raises InfraError whenever there is none that can be believed."""
    nonce = secrets.token_hex(16)
    result = execute(check.script, sandboxes, given={**given, "nonce": nonce}, artifacts=artifacts, resources=resources)
    if result.exit_code != 0 or result.stdout_truncated:
        how = f"killed: {result.killed_by}" if result.killed_by else f"exit {result.exit_code}"
        stderr = result.stderr.decode(errors="replace").strip()[-400:]
        cut = ", output cut" if result.stdout_truncated else ""
        raise InfraError(f"{check.version}: the check ended with {how}{cut}; stderr: {stderr or '(empty)'}")
    try:
        return parse_report(result.stdout, nonce)
    except ValueError as error:
        raise InfraError(f"{check.version}: the check printed no valid report: {error}") from error


def parse_report(stdout: bytes, nonce: str) -> Report:
    """The report in a check's stdout. Raises ValueError that says in which way it isn't one."""
    text = stdout.decode()
    if not text.endswith("\n") or text.count("\n") != 1:
        raise ValueError(f"expected one line that ends in a newline, got {text[:80]!r}")
    value = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(value, dict) or value.keys() != {"nonce", "parts", "findings"}:
        raise ValueError(f"expected an object with nonce, parts and findings, got {text[:80]!r}")
    if value["nonce"] != nonce:
        raise ValueError("the nonce is not the one that was given")
    parts, findings = value["parts"], value["findings"]
    if not isinstance(parts, dict) or not parts or not all(_is_share(part) for part in parts.values()):
        raise ValueError(f"expected parts with values in [0, 1], got {str(parts)[:80]}")
    if not isinstance(findings, list) or not all(_is_finding(finding) for finding in findings):
        raise ValueError(f"expected findings as pairs of strings, got {str(findings)[:80]}")
    if (not findings) != all(part == 1 for part in parts.values()):
        raise ValueError(f"{len(findings)} findings with parts {str(parts)[:80]}; expected some when a part is below 1")
    return Report(
        {name: float(part) for name, part in parts.items()},
        tuple(Finding(subject[:_MAX_SUBJECT_CHARS], message[:_MAX_MESSAGE_CHARS]) for subject, message in findings),
    )


def verdict(check: Check, report: Report, *, partial: bool = False) -> Verdict:
    """The verdict of a report: success and reward 1 when every part is 1, else 0 or, if `partial`, the parts' mean."""
    success = all(part == 1.0 for part in report.parts.values())
    # Below 1 without success, however the mean is rounded.
    mean = min(math.fsum(report.parts.values()) / len(report.parts), math.nextafter(1.0, 0.0))
    reward = 1.0 if success else mean if partial else 0.0
    return Verdict(reward, success, report.parts, report.findings[:_MAX_FINDINGS], check.version)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _is_finding(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
