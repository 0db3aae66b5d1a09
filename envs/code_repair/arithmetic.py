"""Functions of one to three whole numbers."""

from __future__ import annotations

from envs.code_repair.inputs import args, int_in, value_and_limits
from envs.code_repair.template import Template, faults

TEMPLATES = (
    Template(
        ("fib", "fibonacci", "nth_fib"),
        """def f(n):
    a, b = 0, 1
    for i in range(n):
        a, b = b, a + b
    return a
""",
        faults(
            "operator: a + b => a - b",
            "initial: a, b = 0, 1 => a, b = 1, 1",
            "variable: return a => return b",
            "bounds: range(n) => range(n - 1)",
            "bounds: range(n) => range(n + 1)",
        ),
        args(int_in(2, 9)),
        ((0,), (1,), (6,)),
    ),
    Template(
        ("gcd", "common_divisor", "hcf"),
        """def f(a, b):
    while b > 0:
        n = a % b
        a = b
        b = n
    return a
""",
        faults(
            "comparison: b > 0 => b < 0",
            "comparison: b > 0 => b > 1",
            "variable: return a => return b",
        ),
        args(int_in(2, 20), int_in(2, 20)),
        ((5, 1), (12, 18), (7, 21)),
    ),
    Template(
        ("factorial", "fact"),
        """def f(n):
    out = 1
    for i in range(1, n + 1):
        out *= i
    return out
""",
        faults(
            "operator: out *= i => out += i",
            "initial: out = 1 => out = 0",
            "variable: return out => return n",
            "bounds: range(1, n + 1) => range(1, n)",
            "bounds: range(1, n + 1) => range(n + 1)",
        ),
        args(int_in(2, 6)),
        ((0,), (1,), (7,)),
    ),
    Template(
        ("power", "raise_to", "pow_of"),
        """def f(a, n):
    out = 1
    for i in range(n):
        out *= a
    return out
""",
        faults(
            "operator: out *= a => out += a",
            "initial: out = 1 => out = 0",
            "bounds: range(n) => range(n - 1)",
            "bounds: range(n) => range(n + 1)",
            "variable: *= a => *= n",
        ),
        args(int_in(2, 6), int_in(2, 4)),
        ((7, 0), (5, 1), (2, 8)),
    ),
    Template(
        ("clamp", "clip", "limit_to"),
        """def f(x, lo, hi):
    if x < lo:
        return lo
    if x > hi:
        return hi
    return x
""",
        faults(
            "comparison: x < lo => x > lo",
            "comparison: x > hi => x < hi",
            "variable: return lo => return hi",
            "variable: return hi => return lo",
            "variable: return x => return lo",
        ),
        value_and_limits,
        ((-9, 0, 5), (9, 0, 5), (3, 0, 5), (0, 0, 5), (5, 0, 5)),
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
            "bounds: range(n, 0, -1) => range(n, 1, -1)",
            "bounds: range(n, 0, -1) => range(n, -1, -1)",
            "bounds: range(n, 0, -1) => range(n - 1, 0, -1)",
            "builtin: append => extend",
            "variable: append(i) => append(n)",
            "variable: return out => return i",
            "initial: out = [] => out = [0]",
        ),
        args(int_in(1, 5)),
        ((0,), (1,), (6,)),
    ),
)
