"""Judges a repaired file by hidden calls of its function, whose right answers are known only here, outside the sandbox.

The policy's file runs in a clean sandbox that holds nothing else of the episode (edited tests, a conftest.py, a planted
module stay behind) and no answers. Its process prints what the calls returned; that is a claim, parsed here as bounded,
strict JSON and compared with exact types: `True` is not 1, 2.0 is not 2, a tuple is not a list, and there is no
tolerance. Whatever the file does to that process (exit, patch, print lines of its own), it gains nothing unless it
knows the answers. A call without a claim has failed: an early exit, an endless loop or a syntax error never passes.

The reward is 1 when every call is right, otherwise 0; the part `hidden_tests` is the share that is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from postrl.contracts import ExecResult, Files, Finding, InfraError, Resources, SandboxFactory, Task, TaskError, Verdict
from verifiers.checking import Report, execute, load_check, verdict

CHECK = load_check("code_repair", __file__, "code_repair.py")
RESOURCES = Resources(timeout_s=20.0, cpu_s=1, memory_mb=256, disk_mb=4, num_processes=32, output_bytes=65_536)
"""The calls take about 30 ms of CPU in all; an endless loop is stopped after one second."""


def verify(task: Task, artifacts: Files, sandboxes: SandboxFactory) -> Verdict:
    """The verdict on a code-repair episode; see `postrl.contracts.Verifier`. Raises TaskError without hidden calls."""
    expected = task.expected
    if not expected.get("calls"):
        raise TaskError(f"{task.id} can't be judged as a code-repair task: it has no hidden calls")
    path = expected["path"]
    data = artifacts.get(f"work/{path}")
    if data is None:
        return verdict(CHECK, _nothing_right(path, "is missing"))
    if data == task.files[path]:
        return verdict(CHECK, _nothing_right(path, "is unchanged"))
    given = {"path": path, "function": expected["function"], "calls": [call["args"] for call in expected["calls"]]}
    result = execute(CHECK.script, sandboxes, given=given, artifacts={path: data}, resources=RESOURCES)
    return verdict(CHECK, judge(expected, result))


def judge(expected: Mapping[str, Any], result: ExecResult) -> Report:
    """Compares the claims in the run's stdout with the answers. Raises InfraError when the script did not start."""
    lines = result.stdout.split(b"\n")
    if lines[0] != b'"ready"':
        stderr = result.stderr.decode(errors="replace").strip()[-400:]
        raise InfraError(f"{CHECK.version}: the script did not start: {stderr or result.killed_by or result.exit_code}")
    claims = [_parse(line) for line in lines[1:-1]]
    path, calls = expected["path"], expected["calls"]
    if claims and claims[0] is not None:
        return _nothing_right(path, f"can't be loaded: {_short(claims[0])}")
    ended = f"killed: {result.killed_by}" if result.killed_by else f"the process ended with {result.exit_code}"
    findings = []
    for number, call in enumerate(calls, start=1):
        subject = f"{expected['function']}({', '.join(map(repr, call['args']))})"
        if number >= len(claims):
            findings.append(Finding(subject, f"gave no answer: {ended}"))
            continue
        message = _compare(call["want"], claims[number])
        if message is not None:
            findings.append(Finding(subject, message))
    return Report({"hidden_tests": 1 - len(findings) / len(calls)}, tuple(findings))


def same(want: Any, claim: Any) -> bool:
    """Whether a claimed value, as `verifiers/checks/code_repair.py` encodes it, is `want`, types included."""
    if type(want) is list:
        return type(claim) is list and len(claim) == len(want) and all(map(same, want, claim))
    if type(want) is dict:
        pairs = claim.get("dict") if type(claim) is dict else None
        if type(pairs) is not list or len(pairs) != len(want):
            return False
        return all(any(same([key, item], pair) for pair in pairs) for key, item in want.items())
    return type(claim) is type(want) and claim == want


def _compare(want: Any, claim: Any) -> str | None:
    """What is wrong with the claim for one call, or None."""
    if type(claim) is not dict or len(claim) != 1 or not claim.keys() <= {"value", "error"}:
        return f"gave no readable answer, expected {want!r}"
    if "error" in claim:
        return f"raised {_short(claim['error'])}, expected {want!r}"
    return None if same(want, claim["value"]) else f"gave {_short(claim['value'])}, expected {want!r}"


def _parse(line: bytes) -> Any:
    """A line of the claims. Text for what is no JSON: no claim is text, so it counts for nothing."""
    try:
        return json.loads(line, parse_constant=lambda name: f"{name} is not JSON")
    except (ValueError, RecursionError) as error:
        return f"unreadable ({type(error).__name__})"


def _nothing_right(path: str, message: str) -> Report:
    return Report({"hidden_tests": 0.0}, (Finding(path, message),))


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else ascii(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
