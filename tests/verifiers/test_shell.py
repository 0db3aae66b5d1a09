"""The shell verifier on hand-made artifacts: what counts as the same, parts, and findings that say what is wrong."""

import dataclasses
import runpy
from pathlib import Path

import pytest

import verifiers
from envs.sandbox import default_factory
from postrl.contracts import Finding, Task, TaskError, Verdict
from verifiers.shell import CHECK, verify

SANDBOXES = default_factory()
SCRIPT = runpy.run_path(str(Path(verifiers.__file__).parent / "checks" / "shell.py"), run_name="check")


def task(stdout=None, number=False, changes=None):
    expected = {"stdout": stdout, "number": number, "changes": changes or {}}
    return Task("shell", "hand", "train", 0, 0, "S", "P", {"a.txt": b"a\n", "b.txt": b"b\n"}, expected, ("",))


def judge(task_, stdout=b"", **files) -> Verdict:
    """Verdict on `stdout` and the work directory's files, named `a_txt`; None: gone."""
    tree = {**task_.files, **{name.replace("_", "."): data for name, data in files.items()}}
    artifacts = {f"work/{name}": data for name, data in tree.items() if data is not None}
    return verify(task_, {"stdout": stdout, **artifacts}, SANDBOXES)


def findings(verdict):
    return [(finding.subject, finding.message) for finding in verdict.findings]


@pytest.mark.parametrize("stdout", [b"12\n", b"12", b" 12 \n\n", b"+12", b"012", b"12.0\n", b"12.\x30\x30"])
def test_the_same_number(stdout):
    verdict = judge(task("12\n", number=True), stdout)
    assert verdict == Verdict(1.0, True, {"stdout": 1.0, "other files": 1.0}, (), CHECK.version)


@pytest.mark.parametrize(
    ("stdout", "got"),
    [
        (b"13\n", "13"),
        (b"-12\n", "-12"),
        (b"12 a.txt\n", "12 a.txt"),
        (b"12\n13\n", "12\\n13"),
        (b"1 2\n", "1 2"),
        (b"12.5", "12.5"),
        (b"12,0", "12,0"),
        (b"1.2e1", "1.2e1"),
        (b"0xc", "0xc"),
        ("١٢".encode(), "\\u0661\\u0662"),
        (b"nan", "nan"),
        (b"\xff12", "\\ufffd12"),
        (b"9" * 100, "9" * 60 + "... (1 lines)"),
    ],
)
def test_another_number(stdout, got):
    verdict = judge(task("12\n", number=True), stdout)
    assert (verdict.reward, verdict.parts) == (0.0, {"stdout": 0.0, "other files": 1.0})
    assert findings(verdict) == [("stdout", f"expected 12, got {got}")]


@pytest.mark.parametrize("stdout", [b"a b\nc\n", b"a b\nc", b"a b  \nc\r\n\n"])
def test_the_same_lines(stdout):
    assert judge(task("a b\nc\n"), stdout).success


@pytest.mark.parametrize("stdout", [b"a  b\nc\n", b" a b\nc\n", b"c\na b\n", b"a b\n\nc\n", b"a b\nc\nc\n", b"A b\nc"])
def test_other_lines(stdout):
    assert judge(task("a b\nc\n"), stdout).reward == 0.0


def test_no_output():
    assert findings(judge(task("a\n"))) == [("stdout", "expected a, got nothing")]
    assert findings(verify(task("a\n"), {}, SANDBOXES))[0] == ("stdout", "expected a, got nothing")


def test_other_files_must_stay_as_they_were():
    wanted = task("a\n")
    gone, changed = judge(wanted, b"a\n", b_txt=None), judge(wanted, b"a\n", b_txt=b"b")
    assert findings(gone) == [("other files", "b.txt is missing, it was not to be touched")]
    assert findings(changed) == [("other files", "b.txt was changed, it was not to be touched")]
    assert findings(judge(wanted, b"a\n", c_txt=b"")) == [("other files", "'c.txt' was not asked for")]
    left = verify(wanted, {"stdout": b"a\n", "work/a.txt": b"a\n", "work/b.txt": b"b\n", "left_out": b"[1]"}, SANDBOXES)
    assert findings(left) == [("other files", "too much to hand in: [1]")]


def test_changed_files():
    wanted = task(changes={"a.txt": None, "c.txt": "x\ny\n"})
    assert judge(wanted, b"whatever", a_txt=None, c_txt=b"x\ny\n").success
    assert judge(wanted, a_txt=None, c_txt=b"x\ny").success
    half = judge(wanted, a_txt=None, c_txt=b"y\nx\n")
    assert half.parts == {"a.txt": 1.0, "c.txt": 0.0, "other files": 1.0}
    assert findings(half) == [("c.txt", "expected x\\ny, got y\\nx")]
    assert findings(judge(wanted)) == [("a.txt", "should be gone, is still there"), ("c.txt", "is missing")]
    assert findings(judge(wanted, a_txt=None, c_txt=b"")) == [("c.txt", "expected x\\ny, got ")]


def test_verdicts_are_deterministic_and_name_their_verifier():
    first, second = (judge(task("12\n", number=True), b"13\n") for _ in range(2))
    assert first == second
    assert first.findings == (Finding("stdout", "expected 12, got 13"),)
    name, _, digest = first.verifier.partition("@")
    assert (name, len(digest)) == ("shell", 8)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", "0"), ("-0.00", "0"), ("007", "7"), ("+5", "5"), ("-1.50", "-1.5"), ("000.0100", "0.01"), (" 3\n", "3")],
)
def test_canonical_numbers(text, value):
    assert SCRIPT["number"](text) == value


@pytest.mark.parametrize("text", ["", "1 2", ".5", "5.", "--5", "- 5", "1_000", "1,000", "9" * 41, "1." + "9" * 41])
def test_what_is_no_number(text):
    assert SCRIPT["number"](text) is None


@pytest.mark.parametrize(
    "broken",
    [{"expected": {"stdout": "a"}}, {"files": {"a.txt": b"\xff"}}],
    ids=["expected", "files"],
)
def test_a_task_that_cannot_be_judged_is_a_defect_of_the_task(broken):
    with pytest.raises(TaskError, match="shell/hand/train-0-0"):
        verify(dataclasses.replace(task("a\n"), **broken), {}, SANDBOXES)
