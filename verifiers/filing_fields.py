"""Judges the JSON object of a filing task field by field, exactly, and says of each wrong field how it is wrong.

The rule: a field is right when it is a JSON number that equals the expected decimal. 1200000, 1200000.0 and 1.2e6 are
equal; nothing is rounded and there is no tolerance. A string is wrong, whatever it says. Fields that nobody asked for
make success impossible. In a file that isn't one strict JSON object of at most 4 KiB (NaN, a key twice, more text after
it) nothing is right.

The reward is the number of right fields over the number of requested and superfluous ones, so that `{}` gets 0. The
file is parsed in the clean sandbox by our own script, and numbers stay text until they are compared here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from postrl.contracts import ExecResult, Files, Finding, InfraError, Resources, SandboxFactory, Task, TaskError, Verdict
from verifiers import amounts
from verifiers.checking import Check, Report, execute, load_check, verdict, version

_SCRIPT = load_check("filing_fields", __file__, "filing_fields.py").script
_SOURCES = (Path(source).read_bytes() for source in (__file__, amounts.__file__))
CHECK = Check(_SCRIPT, version("filing_fields", _SCRIPT, *_SOURCES))
ANSWER = "work/answer.json"
RESOURCES = Resources(timeout_s=20.0, cpu_s=5, memory_mb=256, disk_mb=4, num_processes=8, output_bytes=65_536)

_MAX_SHOWN_CHARS = 40
_MAX_MAGNITUDE = 40
"""A number of 10^41 or more, or that close to 0, is wrong, and not calculated with."""
_SHIFTS = (
    (0, ""),
    *((sign * power, f"off by {10**power}x: scale") for power in (3, 6, 9) for sign in (1, -1)),
    *((sign * 2, "off by 100x: percent") for sign in (1, -1)),
    *((sign * 4, "off by 10000x: basis points") for sign in (1, -1)),
    *((sign, "off by 10x") for sign in (1, -1)),
)


def verify(task: Task, artifacts: Files, sandboxes: SandboxFactory) -> Verdict:
    """The verdict on a filing episode; see `postrl.contracts.Verifier`. Raises TaskError where nothing is asked."""
    fields = task.expected.get("fields")
    if not fields:
        raise TaskError(f"{task.id} can't be judged as a filing task: no fields are asked")
    data = artifacts.get(ANSWER)
    if data is None:
        return verdict(CHECK, nothing_right(fields, "is missing"))
    result = execute(CHECK.script, sandboxes, given={}, artifacts={ANSWER: data}, resources=RESOURCES)
    problem, found = _parsed(result)
    if problem is not None:
        return verdict(CHECK, nothing_right(fields, problem))
    return verdict(CHECK, judge(task.expected, found), partial=True)


def nothing_right(fields: Mapping[str, Any], problem: str) -> Report:
    """The report where no field could be read."""
    return Report(dict.fromkeys(fields, 0.0), (Finding("answer.json", problem),))


def judge(expected: Mapping[str, Any], found: Sequence[tuple[str, str, str]]) -> Report:
    """Compares what was handed in, as (key, type, text), with the fields of `expected`; keys in `found` differ."""
    by_key = {key: (kind, text) for key, kind, text in found}
    parts: dict[str, float] = {}
    findings: list[Finding] = []
    for key in expected["fields"]:
        message = "is omitted" if key not in by_key else compare(key, *by_key[key], expected)
        parts[key] = 1.0 if message is None else 0.0
        if message is not None:
            findings.append(Finding(key, message))
    extra = [key for key in by_key if key not in expected["fields"]]
    for number, key in enumerate(extra, start=1):
        parts[f"not asked for {number}"] = 0.0
        findings.append(Finding(ascii(key)[1:-1][:80], "was not asked for"))
    return Report(parts, tuple(findings))


def compare(key: str, kind: str, text: str, expected: Mapping[str, Any]) -> str | None:
    """What is wrong with a field, or None. Names the likely mistake, where there is one, and then the two values."""
    want = Decimal(expected["fields"][key]["value"])
    if kind == "a string":
        return f"is {_read_string(text)}, expected the JSON number {want:f}"
    if kind != "a number":
        return f"is {kind}, expected the JSON number {want:f}"
    got = _decimal(text)
    if got == want:
        return None
    mistake = _mistake(got, key, expected) if got is not None else None
    return f"{mistake}: expected {want:f}, got {text}" if mistake else f"expected {want:f}, got {text}"


def _mistake(got: Decimal, key: str, expected: Mapping[str, Any]) -> str | None:
    """The mistake that leads to exactly `got`: a year, row, scale or sign that isn't the right one."""
    field = expected["fields"][key]
    sources = [("", field["value"])]
    sources += [(f"wrong year, that is {year}'s", value) for year, value in field["other_years"].items()]
    rows = {**expected["others"], **{name: other["value"] for name, other in expected["fields"].items() if name != key}}
    sources += [(f"wrong row, that is {name}", value) for name, value in rows.items()]
    for source, value in ((source, Decimal(value)) for source, value in sources):
        for shift, scale in _SHIFTS:
            if got.copy_abs() == value.copy_abs().scaleb(shift):
                sign = "wrong sign" if got.is_signed() != value.is_signed() else ""
                return ", ".join(part for part in (source, scale, sign) if part)
    want = Decimal(field["value"])
    return "digits swapped" if sorted(f"{got.copy_abs():f}") == sorted(f"{want.copy_abs():f}") else None


def _decimal(text: str) -> Decimal | None:
    """The exact value of a JSON number, or None when it is too large or too small to be right."""
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent) > 4 or abs(int(exponent or 0)) > _MAX_MAGNITUDE:
        return None
    return Decimal(f"{mantissa}e{exponent or 0}")


def _read_string(text: str) -> str:
    """A string, and what it would be worth as an amount."""
    shown = ascii(text)[:_MAX_SHOWN_CHARS]
    try:
        return f"the string {shown} (as an amount {amounts.read_amount(text):f})"
    except ValueError:
        return f"the string {shown}"


def _parsed(result: ExecResult) -> tuple[str | None, list[tuple[str, str, str]]]:
    """What our script printed: what is wrong with the file, or its fields. Raises InfraError when it has failed."""
    if result.exit_code != 0 or result.stdout_truncated:
        how = f"killed: {result.killed_by}" if result.killed_by else f"exit {result.exit_code}"
        stderr = result.stderr.decode(errors="replace").strip()[-400:]
        raise InfraError(f"{CHECK.version}: the check ended with {how}; stderr: {stderr or '(empty)'}")
    report = json.loads(result.stdout)
    return report["problem"], [(key, kind, text) for key, kind, text in report["fields"]]
