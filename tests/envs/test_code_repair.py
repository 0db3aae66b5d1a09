"""The code-repair domain: every fault shows in visible and hidden calls; line edits; episodes in the real sandbox."""

import itertools
import re

import numpy as np
import pytest

from envs.code_repair import CodeRepairEnv, generate
from envs.code_repair.env import explain, replace_line
from envs.code_repair.generate import SYSTEM, TEMPLATES, make_task
from envs.code_repair.template import KINDS, ROLES, answer, rename
from postrl.contracts import ExecResult, Task
from tests.envs.episodes import play, sandboxes, sh
from verifiers.router import verify

BROKEN = [(template, fault) for template in TEMPLATES for fault in template.faults]


def loaded(source: str, name: str):
    """A function of our own generated source, which differs from its template in names only."""
    namespace: dict = {}
    exec(source, namespace)  # noqa: S102 - our generated source
    return namespace[name]


def called(function, args):
    try:
        return function(*(list(arg) if isinstance(arg, list) else arg for arg in args))
    except Exception as error:  # noqa: BLE001 - whatever a broken function raises
        return error


def same(a, b) -> bool:
    return (type(a), a) == (type(b), b)


def edit(number: int, body: str) -> str:
    return f"```line {number}\n{body}\n```"


def started(task: Task) -> CodeRepairEnv:
    env = CodeRepairEnv(sandboxes=sandboxes())
    env.reset(options={"task": task})
    return env


def first(function: str, kind: str) -> Task:
    """A task in which `function` has its first fault of `kind`."""
    template = next(template for template in TEMPLATES if function in template.names)
    fault = next(fault for fault in template.faults if fault.kind == kind)
    tasks = (make_task(template, fault, "train", 0, seed, np.random.default_rng(seed)) for seed in range(100))
    return next(task for task in tasks if task.expected["function"] == function)


# ------------------------------------------------------------------------------------------------------- templates


def test_there_are_many_templates_and_every_kind_of_fault_has_many():
    assert len(TEMPLATES) == 17
    assert len(BROKEN) == 64
    assert {kind: sum(fault.kind == kind for _, fault in BROKEN) >= 6 for kind in KINDS} == dict.fromkeys(KINDS, True)
    assert len({name for template in TEMPLATES for name in template.names}) == sum(len(t.names) for t in TEMPLATES)


def test_functions_have_four_to_eight_lines():
    assert {len(template.source.splitlines()) for template in TEMPLATES} <= set(range(4, 9))


def test_names_that_meet_in_a_template_always_differ():
    for template in TEMPLATES:
        for one, other in itertools.combinations(template.roles, 2):
            assert not set(ROLES[one]) & set(ROLES[other]), (template.names[0], one, other)


@pytest.mark.parametrize(("template", "fault"), BROKEN, ids=[f"{t.names[0]}-{f.wrong}" for t, f in BROKEN])
def test_every_fault_fails_visible_and_hidden_calls_and_the_reference_repairs_it(template, fault):
    assert template.source.count(fault.right) == 1
    for seed in range(6):
        task = make_task(template, fault, "train", 0, seed, np.random.default_rng(seed))
        path, function = task.expected["path"], task.expected["function"]
        wrong = task.files[path].decode()
        _, number, body, _ = re.fullmatch(r"(```line (\d+)\n)(.*)(\n```)", task.reference[0]).groups()
        right = replace_line(wrong, int(number), body)
        assert wrong != right
        hidden = [(tuple(call["args"]), call["want"]) for call in task.expected["calls"]]
        visible = [(args, answer(template, None, args)) for args in visible_calls(task)]
        for args, want in hidden + visible:
            assert same(called(loaded(right, function), args), want), (args, want)
        fails = {
            name: [not same(called(loaded(wrong, function), args), want) for args, want in calls]
            for name, calls in {"visible": visible, "hidden": hidden}.items()
        }
        assert fails["visible"][0]
        assert any(fails["hidden"])
        assert not [args for args, _ in visible if args in [hidden_args for hidden_args, _ in hidden]]
        assert 1 <= len(visible) <= 3
        assert len(hidden) >= 3
        assert all(edge in [args for args, _ in hidden] for edge in template.edges)
        assert len({repr(want) for _, want in hidden}) >= 2, "a constant would pass"


def visible_calls(task: Task) -> list[tuple]:
    """The arguments of the calls in the visible test, in order."""
    return [args for args, _ in checks_in(task)]


def checks_in(task: Task) -> list[tuple[tuple, object]]:
    """Arguments and answer of each call in the visible test."""
    found: list[tuple[tuple, object]] = []
    for line in task.files[f"test_{task.expected['path']}"].decode().splitlines():
        if re.match(r"check\(", line):
            eval(line, {"check": lambda want, *args: found.append((args, want))})
    return found


def test_rename_replaces_whole_identifiers_only():
    assert rename("def f(x): return fx + x.f", {"f": "total", "x": "v"}) == "def total(v): return fx + v.total"


# ----------------------------------------------------------------------------------------------------------- texts


def test_texts_fit_their_budgets():
    """31 and at most 107 tokens of SmolLM2's tokenizer; about 3 characters a token here."""
    assert len(SYSTEM) <= 110
    for index in range(600):
        task = generate("train", 0, index)
        assert len(task.prompt) <= 300, task.prompt
        assert len(task.reference[0]) <= 70, task.reference


def test_the_prompt_shows_the_file_and_a_failing_call():
    task = first("total", "operator")
    name, *listing, example = task.prompt.split("\n")
    assert name == "total.py"
    assert "".join(line.split(" ", 1)[1] + "\n" for line in listing).encode() == task.files["total.py"]
    assert [line.split(" ", 1)[0] for line in listing] == ["1", "2", "3", "4", "5"]
    assert re.fullmatch(r"total\(\[.*\]\) gave -?\d+, expected \d+", example)


def test_kinds_take_turns():
    assert [generate("heldout", 0, index).kind for index in range(6)] == list(KINDS)


def test_no_prompt_occurs_in_both_splits():
    train = {generate("train", 0, index).prompt for index in range(4_000)}
    heldout = {generate("heldout", 0, index).prompt for index in range(400)}
    assert not train & heldout


def test_no_constant_answer_pays():
    replies = [generate("train", 0, index).reference[0] for index in range(2_000)]
    assert max(replies.count(reply) for reply in set(replies)) <= 0.03 * len(replies)


# -------------------------------------------------------------------------------------------------------- edits


@pytest.mark.parametrize(
    ("text", "number", "body", "expected"),
    [
        ("a\nb\nc\n", 2, "x", "a\nx\nc\n"),
        ("a\nb\nc\n", 1, "x\ny", "x\ny\nb\nc\n"),
        ("a\nb\nc\n", 3, "", "a\nb\n"),
        ("a\nb", 2, "x", "a\nx\n"),
        ("a\n", 1, "", ""),
        ("a\n\n", 2, "x", "a\nx\n"),
        ("a\r\nb\n", 2, "\tx  ", "a\r\n\tx  \n"),
        ("a\n    b\n", 2, "x", "a\n    x\n"),
        ("a\n    b\n", 2, "if x:\n    y\n\nz", "a\n    if x:\n        y\n\n    z\n"),
        ("a\n    b\n", 2, " x\ny", "a\n x\ny\n"),
        ("a\n    b\n", 2, "", "a\n"),
    ],
)
def test_a_line_is_replaced(text, number, body, expected):
    assert replace_line(text, number, body) == expected


@pytest.mark.parametrize(("text", "number", "num_lines"), [("a\nb\n", 0, 2), ("a\nb\n", 3, 2), ("", 1, 0)])
def test_there_is_no_such_line(text, number, num_lines):
    with pytest.raises(ValueError, match=f"no line {number}: the file has {num_lines}"):
        replace_line(text, number, "x")


@pytest.mark.parametrize(
    ("exit_code", "killed_by", "stdout", "stderr", "expected"),
    [
        (1, None, b"", b"f(1) gave 2, expected 3\n", "f(1) gave 2, expected 3"),
        (1, None, b"debug\n", b"f(1) gave 2, expected 3\n", "debug\nf(1) gave 2, expected 3"),
        (1, None, b"", b'  File "/work/f.py", line 3\n    x x\n      ^\nSyntaxError: no\n', "line 3: SyntaxError: no"),
        (0, None, b"", b"", "exit 0 before the tests were done"),
        (None, "cpu", b"", b"", "killed: cpu (an endless loop?)"),
    ],
)
def test_failures_are_explained(exit_code, killed_by, stdout, stderr, expected):
    assert explain(ExecResult(exit_code, stdout, stderr, False, False, killed_by, 0.0, 0.0, 0.0)) == expected


# ------------------------------------------------------------------------------------------------------- episodes


def test_references_of_many_tasks_succeed_in_one_turn():
    for index in range(48):
        task = generate("train", 7, index)
        _, _, terminated, _, info = play(CodeRepairEnv(sandboxes=sandboxes()), task, task.reference)
        verdict = verify(task, info["artifacts"], sandboxes())
        assert terminated, task.prompt
        assert verdict.success, (task.prompt, verdict.findings)


def test_a_wrong_edit_is_answered_by_the_real_failure_and_can_be_repaired():
    task = first("total", "operator")
    env = started(task)
    example = task.prompt.split("\n")[-1]
    call, want = example.split(" gave ")[0], example.split("expected ")[1]
    observation, reward, terminated, truncated, _ = env.step(edit(5, "    return None"))
    assert observation == f"{call} gave None, expected {want}"
    assert (reward, terminated, truncated) == (0.0, False, False)
    observation, *_ = env.step(edit(5, "    return nothing"))
    assert observation == f"{call} raised NameError: name 'nothing' is not defined"
    rewritten = f"def total(a):\n    return sum(a)\n\n\n{first_line(task, 'old')}"
    observation, _, terminated, truncated, info = env.step(edit(1, rewritten))
    assert (observation, terminated, truncated) == ("passed", True, False)
    assert verify(task, info["artifacts"], sandboxes()).success


def test_line_deletes_and_takes_several_lines():
    task = first("smallest", "variable")
    env = started(task)
    observation, *_ = env.step(edit(6, ""))
    assert observation.endswith(" gave None, expected " + task.prompt.rsplit(" ", 1)[1])
    _, _, terminated, _, info = env.step(edit(1, f"def smallest(a):\n    return min(a)\n\n\n{first_line(task, 'old')}"))
    assert terminated
    assert info["artifacts"]["work/smallest.py"].startswith(b"def smallest(a):\n    return min(a)\n\n\ndef old(")
    assert verify(task, info["artifacts"], sandboxes()).success


def first_line(task: Task, name: str) -> str:
    """The file's first line with another function name."""
    return task.files[task.expected["path"]].decode().split("\n")[0].replace(task.expected["function"], name)


@pytest.mark.parametrize(
    ("reply", "observation"),
    [
        ("```line 9\nx\n```", "no line 9: the file has 5"),
        ("```line 0\nx\n```", "no line 0: the file has 5"),
        ("```line 2\n    {out} = 0\n```", "line 2 already was so"),
        ("```line two\nx\n```", "two is no line number: write ```line 2"),
        ("```line -1\nx\n```", "-1 is no line number: write ```line 2"),
        ("```line 1234567\nx\n```", "1234567 is no line number: write ```line 2"),
        ("```line\nx\n```", "Wrong words after line: write ```line NUMBER"),
        ("```line 2\n    out = = 0\n```", "line 2: SyntaxError: invalid syntax"),
        (
            "```line 2\n out = 0\n```",
            "line 3: IndentationError: unexpected indent",
        ),
        ("```line 2\n    while True: pass\n```", "killed: cpu (an endless loop?)"),
        ("```line 2\n    raise SystemExit(0)\n```", "exit 0 before the tests were done"),
        ("```sh\nls\n```", "test_total.py\ntotal.py"),
        ("```sh\nrm total.py\n```", "(no output)"),
    ],
)
def test_observations(reply, observation):
    task = first("total", "operator")
    out = task.prompt.split("\n")[2].split()[1]
    env = started(task)
    found, reward, terminated, truncated, _ = env.step(reply.replace("{out}", out))
    env.close()
    assert (found, reward, terminated, truncated) == (observation, 0.0, False, False)


def test_the_tests_can_be_run_and_debug_prints_are_shown():
    task = first("total", "operator")
    env = started(task)
    call = task.prompt.split("\n")[-1].split(" gave ")[0]
    observation, *_ = env.step("```test\n```")
    assert observation == task.prompt.split("\n")[-1]
    observation, *_ = env.step(edit(5, "    print('here')"))
    assert observation.startswith(f"here\n{call} gave None, expected ")
    env.close()


def test_a_missing_file_is_an_observation():
    env = started(first("total", "operator"))
    for spoil in ("rm total.py", "rm -f total.py; ln -s /etc/passwd total.py"):
        env.step(sh(spoil))
    observation, _, _, truncated, _ = env.step(edit(1, "x"))
    assert (observation, truncated) == ("total.py is gone", True)


def test_a_cached_module_does_not_hide_an_edit():
    task = first("total", "operator")
    env = started(task)
    env.step(sh("unset PYTHONDONTWRITEBYTECODE; python3 test_total.py"))
    env.step(sh("touch -d 2000-01-01 total.py"))
    _, _, terminated, _, info = env.step(task.reference[0])
    assert terminated
    assert verify(task, info["artifacts"], sandboxes()).success


def test_tests_made_to_pass_end_the_episode_and_earn_nothing():
    task = first("total", "operator")
    env = started(task)
    env.step(sh("echo 'print(\"passed\")' > test_total.py"))
    observation, _, terminated, _, info = env.step("```test\n```")
    assert (observation, terminated) == ("passed", True)
    assert verify(task, info["artifacts"], sandboxes()).reward == 0.0


def test_answers_learned_from_the_visible_tests_earn_nothing():
    for index in range(6):
        task = generate("heldout", 1, index)
        function = task.expected["function"]
        table = {repr(args): want for args, want in checks_in(task)}
        lines = f"def {function}(*args):\n    return {table}[repr(args)]\n\n\n{first_line(task, 'old')}"
        _, _, terminated, _, info = play(CodeRepairEnv(sandboxes=sandboxes()), task, [edit(1, lines)])
        assert terminated, "the visible tests pass"
        assert verify(task, info["artifacts"], sandboxes()).reward == 0.0
