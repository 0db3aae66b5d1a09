"""What a template is: a small correct function, the faults that it can get, and the inputs that it is called with.

A template's source is real Python in canonical names. A task renames it (`ROLES` lists what each canonical name may
become) and replaces one piece of one line by a wrong one. Nothing in the sources depends on the names, so right and
wrong answers come from running the template itself (`answer`): our own constant text, never a policy's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

KINDS = ("operator", "comparison", "bounds", "initial", "variable", "builtin")
"""What is wrong: an arithmetic operator, a comparison, a range or slice, a start value, which variable is used, or
which method or builtin is called."""

Args = tuple[Any, ...]
"""JSON-like positional arguments of one call."""

Draw = Callable[[np.random.Generator], Args]

ROLES = {
    "nums": ("nums", "values", "data", "items", "scores"),
    "x": ("x", "v", "num", "item"),
    "out": ("out", "res", "acc", "result"),
    "text": ("text", "s", "line"),
    "c": ("c", "ch", "char"),
    "words": ("words", "names", "parts", "tokens"),
    "w": ("w", "word", "part", "name"),
    "n": ("n", "m", "size"),
    "k": ("k", "limit", "bound"),
    "i": ("i", "j", "pos"),
    "lo": ("lo", "low", "least"),
    "hi": ("hi", "high", "most"),
}
"""Canonical name -> what it may be called in a task. Names of two roles that meet in one template always differ."""

_IDENTIFIER = re.compile(r"\b[a-z]+\b")


@dataclass(frozen=True)
class Fault:
    """One way to break a template: `right`, which occurs once in its source, becomes `wrong`."""

    kind: str
    right: str
    wrong: str


@dataclass(frozen=True, eq=False)
class Template:
    """One function, called `f` and written in canonical names. Compared by identity."""

    names: tuple[str, ...]
    """What a task may call the function. The name says what it should do."""
    source: str
    faults: tuple[Fault, ...]
    draw: Draw
    """Arguments of an ordinary call."""
    edges: tuple[Args, ...]
    """Arguments of the unusual calls that the hidden tests of every task include."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The canonical names in the source, in order of appearance."""
        return tuple(dict.fromkeys(name for name in _IDENTIFIER.findall(self.source) if name in ROLES))


def faults(*rows: str) -> tuple[Fault, ...]:
    """Faults from rows of the form `kind: right => wrong`."""
    return tuple(Fault(kind, *change.split(" => ")) for kind, change in (row.split(": ", 1) for row in rows))


def rename(source: str, names: dict[str, str]) -> str:
    """`source` with each identifier in `names` replaced by what it maps to."""
    return _IDENTIFIER.sub(lambda match: names.get(match[0], match[0]), source)


def answer(template: Template, fault: Fault | None, args: Args) -> Any:
    """What the template, whole or broken by `fault`, returns for `args`; the exception itself when it raises one."""
    copies = [list(arg) if isinstance(arg, list) else arg for arg in args]
    try:
        return _function(template, fault)(*copies)
    except Exception as error:  # noqa: BLE001 - a broken function may raise anything, and that is its answer
        return error


@cache
def _function(template: Template, fault: Fault | None) -> Callable[..., Any]:
    source = template.source if fault is None else template.source.replace(fault.right, fault.wrong)
    namespace: dict[str, Any] = {}
    exec(compile(source, "<template>", "exec"), namespace)  # noqa: S102 - a constant of this package
    return namespace["f"]
