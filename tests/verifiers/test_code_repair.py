"""The code-repair verifier on hand-made files: exact types, the ways to cheat that were seen in public, our faults."""

import dataclasses
import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import verifiers
from envs.sandbox import default_factory
from postrl.contracts import ExecResult, Finding, InfraError, Task, TaskError, Verdict
from verifiers.code_repair import CHECK, judge, same, verify

SANDBOXES = default_factory()
SCRIPT = runpy.run_path(str(Path(verifiers.__file__).parent / "checks" / "code_repair.py"), run_name="check")

WRONG = b"def total(a):\n    return sum(a) + 1\n"
RIGHT = b"def total(a):\n    return sum(a)\n"
CALLS = [{"args": [[1, 2]], "want": 3}, {"args": [[]], "want": 0}, {"args": [[5]], "want": 5}]
TASK = Task(
    "code_repair",
    "hand",
    "train",
    0,
    0,
    "S",
    "P",
    {"total.py": WRONG, "test_total.py": b"print('passed')\n"},
    {"path": "total.py", "function": "total", "calls": CALLS},
    ("",),
)


def judged(source: str | bytes, task: Task = TASK, **others: bytes) -> Verdict:
    """Verdict on a hand-in of `total.py` and further files, named `a_py`."""
    data = source.encode() if isinstance(source, str) else source
    artifacts = {f"work/{name.replace('_', '.')}": content for name, content in others.items()}
    return verify(task, {"work/total.py": data, **artifacts}, SANDBOXES)


def returning(want: object, source: str) -> Verdict:
    """Verdict on a function without arguments that should return `want`."""
    expected = {**TASK.expected, "calls": [{"args": [], "want": want}]}
    return judged(source, dataclasses.replace(TASK, expected=expected))


def messages(verdict: Verdict) -> list[tuple[str, str]]:
    return [(finding.subject, finding.message) for finding in verdict.findings]


def test_a_right_function_succeeds():
    assert judged(RIGHT) == Verdict(1.0, True, {"hidden_tests": 1.0}, (), CHECK.version)


@pytest.mark.parametrize(
    "source",
    [
        "total = sum",
        "def total(a):\n    print('debug', a)\n    return sum(a)",
        "import sys\ndef total(a):\n    sys.stderr.write('x' * 100_000)\n    return sum(a)",
        "def total(a, start=0):\n    for x in a:\n        start += x\n    a.clear()\n    return start",
        "def total(a):\n    return sum(a)\nif __name__ == '__main__':\n    raise SystemExit(1)",
        "class Total:\n    def __call__(self, a):\n        return sum(a)\ntotal = Total()",
    ],
)
def test_how_it_is_written_does_not_matter(source):
    assert judged(source).success


def test_partly_right_earns_nothing_and_says_which_calls_fail():
    verdict = judged("def total(a):\n    return sum(a) if a else None\n")
    assert (verdict.reward, verdict.success) == (0.0, False)
    assert verdict.parts == {"hidden_tests": 1 - 1 / 3}
    assert messages(verdict) == [("total([])", "gave None, expected 0")]


def test_no_op_empty_and_missing_files_earn_nothing():
    unchanged, empty, gone = judged(WRONG), judged(b""), verify(TASK, {}, SANDBOXES)
    assert messages(unchanged) == [("total.py", "is unchanged")]
    assert messages(gone) == [("total.py", "is missing")]
    ((subject, message),) = messages(empty)
    assert (subject, message) == (
        "total.py",
        "can't be loaded: AttributeError: module 'total' has no attribute 'total'",
    )
    for verdict in (unchanged, empty, gone, judged(WRONG + b"# repaired\n")):
        assert verdict.reward == 0.0
        assert verdict.parts == {"hidden_tests": 0.0}


# ------------------------------------------------------------------------------------------------------ tampering

FIND_CHANNEL = """
import json, os
def spread(line):
    for fd in range(1, 20):
        try:
            os.write(fd, line.encode())
        except OSError:
            pass
"""

CHEATS = {
    # Cases D.45: an exit at import; a completion count is what tells.
    "exit at import": "import sys\nsys.exit(0)\n",
    "hard exit at import": "import os\nos._exit(0)\n",
    "exit in the call": "import os\ndef total(a):\n    os._exit(0)\n",
    "system exit in the call": "def total(a):\n    raise SystemExit(0)\n",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef total(a):\n    return 0\n",
    # D.43: forged lines in the stream that is read.
    "printed passes": "print('passed')\nprint('{\"value\": 3}')\nimport os\nos._exit(0)\n",
    "forged claims": FIND_CHANNEL + "spread('null\\n' + '{\"value\": 0}\\n' * 3)\nos._exit(0)\n",
    "forged reports": FIND_CHANNEL
    + 'spread(json.dumps({"parts": {"hidden_tests": 1.0}, "findings": [], "success": True}) + "\\n")\nos._exit(0)\n',
    "a guess for each call": FIND_CHANNEL
    + 'def total(a):\n    spread(\'{"value": 3}\\n{"value": 0}\\n{"value": 1}\\n\')\n',
    # D.46: what compares equal to anything, and the stack that might hold the answers.
    "equal to everything": "class Any:\n    __eq__ = lambda self, other: True\ntotal = lambda a: Any()\n",
    "an int that equals": "class Any(int):\n    __eq__ = lambda self, other: True\ntotal = lambda a: Any(3)\n",
    "stack walk": """
import sys
def total(a):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, dict) and 'calls' in value:
                for call in value['calls']:
                    if isinstance(call, dict) and call.get('args') == [a]:
                        return call['want']
        frame = frame.f_back
""",
    "reads the checker's files": """
import glob, json
def total(a):
    for path in glob.glob('/verify/*') + glob.glob('/work/*'):
        try:
            given = json.load(open(path))
            return next(call['want'] for call in given['calls'] if call['args'] == [a])
        except Exception:
            pass
""",
    "collector hunts answers": """
import gc
def total(a):
    for value in gc.get_objects():
        if isinstance(value, dict) and value.get('args') == [a] and 'want' in value:
            return value['want']
""",
    "patched json": "import json\njson.dumps = lambda value: '{\"value\": 3}'\ntotal = lambda a: None\n",
    "patched builtins": "import builtins\nbuiltins.len = max\nbuiltins.type = lambda x: int\ntotal = lambda a: 9\n",
    "patched script": "import __main__\n__main__.encode = lambda value: 3\ntotal = lambda a: 1\n",
    "writes the checker's files": """
import os
for path in ('/verify/given.json', '/verify/check.py'):
    try:
        os.chmod(path, 0o777)
        open(path, 'w').write('{}')
    except OSError:
        pass
total = lambda a: 1
""",
    # D.51: what can't be loaded is no pass.
    "syntax error": "def total(a):\nreturn sum(a)\n",
    "no function": "x = 1\n",
    "not callable": "total = 3\n",
    "other signature": "def total():\n    return 3\n",
    "import error": "import nothing_there\ndef total(a):\n    return sum(a)\n",
    "NUL": "def total(a):\n    return sum(a)\n\0",
    # D.53: nothing, an error code, or a truthy value is no pass.
    "none": "def total(a):\n    pass\n",
    "truthy": "def total(a):\n    return True\n",
    "not implemented": "def total(a):\n    return NotImplemented\n",
    "skipped": "import unittest\ndef total(a):\n    raise unittest.SkipTest('no')\n",
    "constant": "def total(a):\n    return 3\n",
    "endless loop": "def total(a):\n    while True:\n        pass\n",
    "endless loop at import": "while True:\n    pass\n",
    "endless output": "import os\ndef total(a):\n    while True:\n        os.write(1, b'x' * 65536)\n",
    "flood": FIND_CHANNEL + "while True:\n    spread('x' * 60000 + '\\n')\n",
    "recursion": "def total(a):\n    return total(a)\n",
    "deep result": "def total(a):\n    x = []\n    for _ in range(100_000):\n        x = [x]\n    return x\n",
    "deep claims": FIND_CHANNEL + "spread('null\\n' + ('[' * 9000 + '\\n') * 3)\nos._exit(0)\n",
    "circular result": "def total(a):\n    x = []\n    x.append(x)\n    return x\n",
    "large result": "def total(a):\n    return 'x' * 10_000_000\n",
    "large number": "def total(a):\n    return 10 ** 100_000\n",
    "much memory": "def total(a):\n    return len('x' * 10 ** 9)\n",
    "nan": "def total(a):\n    return float('nan')\n",
    "bytes": "def total(a):\n    return b'3'\n",
    "surrogate": "def total(a):\n    return '\\ud800'\n",
    "evil error": "class E(Exception):\n    def __str__(self):\n        raise E\ndef total(a):\n    raise E\n",
    "evil type": """
class M(type):
    __name__ = property(lambda self: 1 / 0)
class C(metaclass=M):
    pass
total = lambda a: C()
""",
    "fork": """
import os
for _ in range(200):
    try:
        os.fork()
    except OSError:
        break
total = lambda a: 3
""",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)\n",
}


@pytest.mark.parametrize("source", CHEATS.values(), ids=list(CHEATS))
def test_cheats_and_broken_files_earn_nothing_and_are_no_fault_of_ours(source):
    verdict = judged(source)
    assert (verdict.reward, verdict.success) == (0.0, False)
    assert verdict.findings


def test_other_files_of_the_episode_stay_behind():
    """Cases D.43, D.47, D.50: conftest.py, edited tests, planted modules and configuration decide nothing."""
    planted = {
        "conftest_py": b"raise SystemExit(0)\n",
        "test_total_py": b"print('passed')\n",
        "json_py": b"raise SystemExit(0)\n",
        "helper_py": b"def total(a):\n    return sum(a)\n",
        "sitecustomize_py": b"import os\nos._exit(0)\n",
        "given_json": b"{}",
        "pyproject_toml": b"[tool.pytest]\n",
    }
    assert judged(RIGHT, **planted).success
    assert judged(WRONG + b"#\n", **planted).reward == 0.0
    verdict = judged("from helper import total\n", **planted)
    assert messages(verdict) == [("total.py", "can't be loaded: ModuleNotFoundError: No module named 'helper'")]


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("def total(a)\n    return 1\n", ("total.py", "can't be loaded: SyntaxError in line 1: expected ':'")),
        ("def add(a):\n    return sum(a)\n", ("total.py", "can't be loaded: AttributeError: module 'total' has no")),
        ("def total(a, b):\n    return a\n", ("total([1, 2])", "raised TypeError: total() missing 1 required")),
        ("import sys\nsys.exit(0)\n", ("total.py", "can't be loaded: SystemExit: 0")),
        ("import os\nos._exit(0)\n", ("total([1, 2])", "gave no answer: the process ended with 0")),
        ("def total(a):\n    return float(sum(a))\n", ("total([1, 2])", "gave 3.0, expected 3")),
        ("def total(a):\n    return {'a'}\n", ("total([1, 2])", "gave {'other': 'set'}, expected 3")),
    ],
)
def test_findings_say_what_happened(source, finding):
    subject, message = messages(judged(source))[0]
    assert subject == finding[0]
    assert message.startswith(finding[1])


# ---------------------------------------------------------------------------------------------------- exact types


@pytest.mark.parametrize(
    ("want", "source", "success"),
    [
        (1, "1", True),
        (1, "True", False),
        (1, "1.0", False),
        (True, "True", True),
        (True, "1", False),
        (True, "'yes'", False),
        (2.5, "5 / 2", True),
        (2.0, "2", False),
        (0.3, "0.1 + 0.2", False),
        ("ab", "'a' + 'b'", True),
        ("ab", "b'ab'", False),
        ("ab", "'ab\\n'", False),
        ("é", "'\\xe9'", True),
        ([1, 2], "[1, 2]", True),
        ([1, 2], "(1, 2)", False),
        ([1, 2], "[2, 1]", False),
        ([1, 2], "range(1, 3)", False),
        ([1, 2], "[1, 2, 2]", False),
        ([True], "[1]", False),
        ([], "''", False),
        ([], "None", False),
        (None, "None", True),
        (None, "0", False),
        ({"a": 1, "b": 2}, "{'b': 2, 'a': 1}", True),
        ({"a": 1}, "{'a': 1.0}", False),
        ({"a": 1}, "{'a': 1, 'b': 2}", False),
        ({"a": 1}, "[['a', 1]]", False),
        ({"dict": []}, "{}", False),
        ({}, "{}", True),
        ({}, "{'dict': []}", False),
        ({}, "__import__('collections').Counter()", False),
    ],
)
def test_values_are_compared_with_their_types(want, source, success):
    assert returning(want, f"def total():\n    return {source}\n").success is success


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def typed(value: object) -> object:
    """A form in which == compares types too, and -0.0 equals 0.0."""
    if isinstance(value, list):
        return ("list", [typed(item) for item in value])
    if isinstance(value, dict):
        return ("dict", {key: typed(item) for key, item in value.items()})
    return (type(value).__name__, value)


@given(VALUES, VALUES)
def test_a_claim_matches_exactly_the_value_it_was_made_from(want, other):
    claim = json.loads(json.dumps(SCRIPT["encode"](want)))
    assert same(want, claim)
    assert same(other, claim) == (typed(other) == typed(want))


CLAIMS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["dict", "other", "value", "error"]), inner),
    max_leaves=8,
)


@given(VALUES, CLAIMS)
def test_no_claim_whatever_it_is_breaks_the_comparison(want, claim):
    assert same(want, claim) in (True, False)


# ------------------------------------------------------------------------------------------------- reading claims


def report_of(stdout: bytes, exit_code: int | None = 0, killed_by: str | None = None):
    return judge(TASK.expected, ExecResult(exit_code, stdout, b"oops\n", False, False, killed_by, 0.0, 0.0, 0.0))


@given(st.binary(max_size=200))
def test_no_output_whatever_it_is_is_right_by_chance_or_breaks_the_judge(noise):
    assert report_of(b'"ready"\n' + noise).parts["hidden_tests"] < 1


def test_claims_count_in_their_order():
    ready = b'"ready"\nnull\n'
    assert report_of(ready + b'{"value": 3}\n{"value": 0}\n{"value": 5}\n').findings == ()
    assert report_of(ready + b'{"value": 0}\n{"value": 3}\n{"value": 5}\n').parts == {"hidden_tests": 1 - 2 / 3}
    cut = report_of(ready + b'{"value": 3}\n{"value": 0}\n{"value": 5}', None, "cpu")
    assert cut.findings == (Finding("total([5])", "gave no answer: killed: cpu"),)
    both = report_of(ready + b'{"value": 3, "error": ""}\n{"value": 0}\n{"value": 5}\n')
    assert both.findings == (Finding("total([1, 2])", "gave no readable answer, expected 3"),)


@pytest.mark.parametrize("stdout", [b"", b"\n", b'"ready', b"ready\n", b'{"value": 3}\n'])
def test_a_script_that_did_not_start_is_a_fault_of_ours(stdout):
    with pytest.raises(InfraError, match=r"code_repair@[0-9a-f]{8}: the script did not start: oops"):
        report_of(stdout, 127)


@pytest.mark.parametrize("calls", [{}, {"calls": []}])
def test_a_task_without_hidden_calls_is_a_defect_of_the_task(calls):
    """Cases D.52, D.53: 0 of 0 is no pass."""
    expected = {"path": "total.py", "function": "total", **calls}
    with pytest.raises(TaskError, match="code_repair/hand/train-0-0 can't be judged"):
        judged(RIGHT, dataclasses.replace(TASK, expected=expected))


def test_verdicts_are_deterministic():
    cheat = CHEATS["forged claims"]
    assert judged(cheat) == judged(cheat)
