"""Functions that search or rebuild lists of numbers."""

from __future__ import annotations

from envs.code_repair.inputs import SOME, SOME_AND_ONE, args, ints
from envs.code_repair.template import Template, faults

TEMPLATES = (
    Template(
        ("keep_above", "only_above", "select_above"),
        """def f(nums, k):
    out = []
    for x in nums:
        if x > k:
            out.append(x)
    return out
""",
        faults(
            "comparison: x > k => x < k",
            "comparison: x > k => x >= k",
            "builtin: out.append(x) => out.extend(x)",
            "variable: append(x) => append(k)",
            "variable: return out => return nums",
            "initial: out = [] => out = [k]",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([5, 6, 4], 4)),
    ),
    Template(
        ("keep_even", "only_even", "evens"),
        """def f(nums):
    out = []
    for x in nums:
        if x % 2 == 0:
            out.append(x)
    return out
""",
        faults(
            "comparison: == 0 => != 0",
            "operator: x % 2 => x // 2",
            "builtin: out.append(x) => out.extend(x)",
            "variable: return out => return nums",
        ),
        SOME,
        (([],), ([0, 1],), ([2, 4, 7],)),
    ),
    Template(
        ("has_above", "any_above", "some_above"),
        """def f(nums, k):
    out = []
    for x in nums:
        out.append(x > k)
    return any(out)
""",
        faults(
            "builtin: any(out) => all(out)",
            "comparison: x > k => x < k",
            "initial: out = [] => out = [True]",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([1, 9], 4), ([1, 2], 4)),
    ),
    Template(
        ("unique", "distinct", "dedupe"),
        """def f(nums):
    out = []
    for x in nums:
        if x not in out:
            out.append(x)
    return out
""",
        faults(
            "comparison: not in out => in out",
            "builtin: append => extend",
            "initial: out = [] => out = [0]",
            "variable: return out => return nums",
        ),
        args(ints(1, 3, 3, 5)),
        (([],), ([7],), ([5, 5, 5],), ([2, 1, 2],)),
    ),
)
