"""Code-repair tasks: a template under new names with one fault, visible tests that show it, hidden tests that decide.

By construction the fault changes the answer of the call that the prompt shows, and of at least one hidden call; the
hidden calls are others than the visible ones, and include the template's edge cases.
"""

from __future__ import annotations

import numpy as np

from envs.code_repair import arithmetic, folds, lists, text
from envs.code_repair.template import KINDS, ROLES, Args, Fault, Template, answer, rename
from envs.splits import draw
from postrl.contracts import Resources, Split, Task

SYSTEM = "Fix the Python file. Rewrite its wrong line:\n```line 2\nnew code\n```\nOther tools: ```test, ```sh"

TEMPLATES = folds.TEMPLATES + arithmetic.TEMPLATES + lists.TEMPLATES + text.TEMPLATES

RESOURCES = Resources(timeout_s=5.0, cpu_s=1, memory_mb=256, disk_mb=4, file_mb=1, num_processes=32, output_bytes=8_192)
"""A test takes about 30 ms of CPU; an endless loop is stopped after one second."""

_NUM_HIDDEN = 4
"""Drawn hidden calls on which the fault shows, and as many on which it may not; the edge cases come on top."""
_NUM_DRAWN = 16
_MAX_ROUNDS = 20
_MAX_EXAMPLE_CHARS = 64

_BROKEN = {
    kind: tuple((template, fault) for template in TEMPLATES for fault in template.faults if fault.kind == kind)
    for kind in KINDS
}

_TEST = """\
from {f} import {f}


def check(want, *args):
    call = "{f}(" + ", ".join(map(repr, args)) + ")"
    try:
        got = {f}(*args)
    except Exception as error:
        raise SystemExit(f"{{call}} raised {{type(error).__name__}}: {{error}}")
    if (type(got), got) != (type(want), want):
        raise SystemExit(f"{{call}} gave {{got!r}}, expected {{want!r}}")


{checks}
print("passed")
"""


def generate(split: Split, seed: int, index: int) -> Task:
    """The code-repair task of that name; see `postrl.contracts.Domain.generate`. Kinds take turns by index.

    Ten of eleven tasks quote the wrong line; the eleventh leaves it to be found.
    """
    kind = KINDS[index % len(KINDS)]
    located = index % 11 != 10

    def make(rng: np.random.Generator) -> Task:
        template, fault = _BROKEN[kind][rng.integers(len(_BROKEN[kind]))]
        return make_task(template, fault, split, seed, index, rng, located)

    return draw("code_repair", split, seed, index, make, by_prompt=True)


def make_task(
    template: Template,
    fault: Fault,
    split: Split,
    seed: int,
    index: int,
    rng: np.random.Generator,
    located: bool = False,
) -> Task:
    """`template` broken by `fault`, with names and calls from `rng`. `split`, `seed` and `index` only name the task.

    `located`: the prompt quotes the wrong line.
    """
    function = template.names[rng.integers(len(template.names))]
    names = {role: ROLES[role][rng.integers(len(ROLES[role]))] for role in template.roles} | {"f": function}
    right = rename(template.source, names).splitlines()
    wrong = rename(template.source.replace(fault.right, fault.wrong), names).splitlines()
    (number,) = (n for n, pair in enumerate(zip(right, wrong, strict=True), 1) if pair[0] != pair[1])
    visible, hidden = _calls(template, fault, rng)
    path = f"{function}.py"
    listing = "\n".join(f"{n} {line}" for n, line in enumerate(wrong, 1))
    checks = "\n".join(f"check({', '.join(map(repr, (answer(template, None, args), *args)))})" for args in visible)
    return Task(
        domain="code_repair",
        kind=fault.kind,
        split=split,
        seed=seed,
        index=index,
        system=SYSTEM,
        prompt=f"{path}\n{listing}\n{_example(template, fault, visible[0], function)}"
        + (f"\nLine {number} is wrong:\n{wrong[number - 1].strip()}" if located else ""),
        files={
            path: ("\n".join(wrong) + "\n").encode(),
            f"test_{path}": _TEST.format(f=function, checks=checks).encode(),
        },
        expected={
            "path": path,
            "function": function,
            "calls": [{"args": list(args), "want": answer(template, None, args)} for args in hidden],
        },
        reference=(f"```line {number}\n{right[number - 1].strip()}\n```",),
        max_turns=3,
        resources=RESOURCES,
    )


def _calls(template: Template, fault: Fault, rng: np.random.Generator) -> tuple[list[Args], list[Args]]:
    """Visible calls, the first of which fails, and hidden calls, at least one of which fails; all different."""
    drawn: list[Args] = []
    for _ in range(_MAX_ROUNDS):
        for _ in range(_NUM_DRAWN):
            args = template.draw(rng)
            if args not in drawn and args not in template.edges:
                drawn.append(args)
        failing = [args for args in drawn if _fails(template, fault, args)]
        shown = next((args for args in failing if len(_example(template, fault, args)) <= _MAX_EXAMPLE_CHARS), None)
        if shown is not None and (len(failing) > 1 or any(_fails(template, fault, args) for args in template.edges)):
            break
    else:
        raise AssertionError(f"{template.names[0]}, {fault}: no short failing call in {len(drawn)}")
    failing.remove(shown)
    passing = [args for args in drawn if args not in failing and args != shown]
    hidden_failing = failing[:_NUM_HIDDEN]
    others = [*passing, *failing[_NUM_HIDDEN:]]
    return [shown, *others[:2]], [*template.edges, *hidden_failing, *others[2 : 2 + _NUM_HIDDEN]]


def _fails(template: Template, fault: Fault, args: Args) -> bool:
    want, got = answer(template, None, args), answer(template, fault, args)
    return (type(want), want) != (type(got), got)


def _example(template: Template, fault: Fault, args: Args, function: str = "function") -> str:
    """The failing call, as the prompt shows it. An error's message is left out: it differs between Python versions."""
    want, got = answer(template, None, args), answer(template, fault, args)
    outcome = f"raised {type(got).__name__}" if isinstance(got, Exception) else f"gave {got!r}"
    return f"{function}({', '.join(map(repr, args))}) {outcome}, expected {want!r}"
