"""Functions of one to three whole numbers."""

from __future__ import annotations

from envs.code_repair.inputs import args, int_in
from envs.code_repair.template import Template, faults

TEMPLATES = (
    Template(
        ("factorial", "fact"),
        """def f(n):
    out = 1
    for i in range(1, n + 1):
        out *= i
    return out
""",
        faults(
            "initial: out = 1 => out = 0",
            "variable: return out => return n",
        ),
        args(int_in(2, 6)),
        ((0,), (1,), (7,)),
    ),
    Template(
        ("countdown", "count_down", "down_from"),
        """def f(n):
    out = []
    for i in range(n, 0, -1):
        out.append(i)
    return out
""",
        faults(
            "builtin: append => extend",
            "variable: append(i) => append(n)",
            "variable: return out => return i",
            "initial: out = [] => out = [0]",
        ),
        args(int_in(1, 5)),
        ((0,), (1,), (6,)),
    ),
)
