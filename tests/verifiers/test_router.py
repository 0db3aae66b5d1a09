"""The router, and what all verifiers share: strict reports, faults that are no verdicts, versions by source."""

import dataclasses
import json
import math

import pytest

import envs
from envs.sandbox import default_factory
from postrl.contracts import Finding, InfraError, Resources
from verifiers import checking, router
from verifiers.checking import Check, Report, execute, parse_report, run_check, verdict, version

SANDBOXES = default_factory()
HEADER = b"import json, os, sys, time\ngiven = json.load(open('/verify/given.json'))\nnonce = given['nonce']\n"


def test_every_domain_has_a_verifier():
    assert set(router.VERIFIERS) == set(envs.domains())
    with pytest.raises(TypeError):
        router.VERIFIERS["shell"] = "json:loads"


def test_a_domain_without_a_verifier_is_a_mistake_that_says_so():
    task = dataclasses.replace(envs.domains()["shell"].generate("train", 0, 0), domain="poetry")
    with pytest.raises(ValueError, match=r"no verifier for the domain 'poetry'; expected one of shell, "):
        router.verify(task, {}, SANDBOXES)


# ------------------------------------------------------------------------------------------------------- reports


def report(**changes) -> bytes:
    value = {"nonce": "n", "parts": {"a": 1.0, "b": 0}, "findings": [["b", "wrong"]], **changes}
    return json.dumps({key: part for key, part in value.items() if part != "absent"}).encode() + b"\n"


def test_a_valid_report():
    assert parse_report(report(), "n") == Report({"a": 1.0, "b": 0.0}, (Finding("b", "wrong"),))
    assert parse_report(report(parts={"a": 1}, findings=[]), "n") == Report({"a": 1.0}, ())


@pytest.mark.parametrize(
    "stdout",
    [
        b"",
        b"\n",
        b"null\n",
        b"[]\n",
        b"1.0\n",
        b"\xff\n",
        report()[:-1],
        report() + report(),
        b"note\n" + report(),
        report(nonce="other"),
        report(nonce="absent"),
        report(nonce=None),
        report(parts="absent"),
        report(parts={}),
        report(parts=[1.0]),
        report(parts={"a": True, "b": 0}),
        report(parts={"a": "1", "b": 0}),
        report(parts={"a": 1.1, "b": 0}),
        report(parts={"a": -0.1}),
        report(parts={"a": None}),
        report().replace(b"1.0", b"NaN"),
        report().replace(b"1.0", b"Infinity"),
        report(findings="absent"),
        report(findings=[]),
        report(parts={"a": 1}),
        report(findings=[["b"]]),
        report(findings=[["b", 1]]),
        report(findings=["bx"]),
        report(findings={"b": "wrong"}),
        report(reward=1.0),
    ],
)
def test_everything_else_is_no_report(stdout):
    with pytest.raises(ValueError):  # noqa: PT011 - json's own messages are among them
        parse_report(stdout, "n")


def test_findings_are_bounded():
    long = parse_report(report(findings=[["s" * 999, "m" * 9_999]] * 99), "n")
    assert {(len(finding.subject), len(finding.message)) for finding in long.findings} == {(120, 400)}
    assert len(verdict(Check(b"", "x@0"), long).findings) == 32


@pytest.mark.parametrize(
    ("parts", "partial", "reward", "success"),
    [
        ({"a": 1.0, "b": 1.0}, False, 1.0, True),
        ({"a": 1.0, "b": 1.0}, True, 1.0, True),
        ({"a": 1.0, "b": 0.0}, False, 0.0, False),
        ({"a": 1.0, "b": 0.0}, True, 0.5, False),
        ({"a": 0.0}, True, 0.0, False),
        # The mean of these rounds to 1.
        ({"a": 1.0, "b": math.nextafter(1.0, 0.0)}, True, math.nextafter(1.0, 0.0), False),
    ],
)
def test_verdicts(parts, partial, reward, success):
    found = verdict(Check(b"", "x@12345678"), Report(parts, ()), partial=partial)
    assert (found.reward, found.success, found.parts, found.verifier) == (reward, success, parts, "x@12345678")


# -------------------------------------------------------------------------------------------- scripts in a sandbox


def run(body: bytes, artifacts=None, **kwargs) -> Report:
    check = Check(HEADER + body, "probe@00000000")
    return run_check(check, SANDBOXES, given={"want": "x"}, artifacts=artifacts or {}, **kwargs)


OK = b"print(json.dumps({'nonce': nonce, 'parts': {'a': 1}, 'findings': []}))\n"


def test_a_script_reads_its_input_and_the_artifacts():
    body = b"assert given['want'] == 'x' and open('work/a.txt').read() == 'data'\n"
    assert run(body + OK, {"work/a.txt": b"data"}) == Report({"a": 1.0}, ())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"pass\n", "no valid report: expected one line"),
        (OK + OK, "no valid report: expected one line"),
        (OK + b"sys.exit(3)\n", "ended with exit 3"),
        (b"raise KeyError('lost')\n", "KeyError: 'lost'"),
        (OK + b"sys.stdout.flush(); os.kill(os.getpid(), 9)\n", "ended with "),
        (OK.replace(b"nonce,", b"'0' * 32,"), "the nonce is not the one"),
        (b"print('x' * 100_000)\n", "output"),
        (b"open('/verify/check.py', 'w')\n", "Error"),
        (b"import socket; socket.create_connection(('192.0.2.1', 80), 1)\n", "Error"),
    ],
)
def test_a_broken_check_is_a_fault_and_never_a_verdict(body, message):
    with pytest.raises(InfraError, match=message) as caught:
        run(body)
    assert "probe@00000000" in str(caught.value)


def test_a_check_that_takes_too_long_is_a_fault():
    with pytest.raises(InfraError, match="killed: timeout"):
        run(b"time.sleep(60)\n" + OK, resources=Resources(timeout_s=1.0))


def test_artifacts_are_never_imported():
    evil = b"raise SystemExit(0)\n"
    planted = {name: evil for name in ("json.py", "os.py", "sitecustomize.py", "usercustomize.py", "check.py")}
    assert run(OK, {**planted, **{f"work/{name}": evil for name in planted}}) == Report({"a": 1.0}, ())


def test_a_sandbox_that_cannot_be_made_is_a_fault():
    class Broken:
        def create(self, files, resources=None, read_only=None):
            raise InfraError("no sandbox")

    with pytest.raises(InfraError, match="no sandbox"):
        run_check(Check(b"", "x@0"), Broken(), given={}, artifacts={})


def test_execute_gives_the_bare_result():
    result = execute(b"import sys; sys.exit(5)", SANDBOXES, given={}, artifacts={})
    assert (result.exit_code, result.stdout) == (5, b"")


def test_versions_follow_every_source(monkeypatch, tmp_path):
    assert version("a", b"x") == version("a", b"x")
    names = {version("a", b"x"), version("a", b"y"), version("a", b"x", b""), version("b", b"x")}
    assert len(names) == 4
    assert all(len(name) == len("a@12345678") for name in names)
    before = version("a", b"x")
    (tmp_path / "checking.py").write_text("changed")
    monkeypatch.setattr(checking, "__file__", str(tmp_path / "checking.py"))
    assert version("a", b"x") != before
