"""Functions that fold a list of numbers into one."""

from __future__ import annotations

from envs.code_repair.inputs import SOME, SOME_AND_ONE, args, exact_mean, ints
from envs.code_repair.template import Template, faults

TEMPLATES = (
    Template(
        ("total", "add_all", "sum_of"),
        """def f(nums):
    out = 0
    for x in nums:
        out += x
    return out
""",
        faults(
            "operator: out += x => out -= x",
            "initial: out = 0 => out = 1",
            "variable: return out => return x",
            "bounds: in nums: => in nums[1:]:",
            "bounds: in nums: => in nums[:-1]:",
        ),
        SOME,
        (([],), ([7],), ([-2, 2, -5],)),
    ),
    Template(
        ("product", "multiply_all", "prod"),
        """def f(nums):
    out = 1
    for x in nums:
        out *= x
    return out
""",
        faults(
            "initial: out = 1 => out = 0",
            "variable: return out => return x",
            "bounds: in nums: => in nums[1:]:",
        ),
        args(ints(2, 6, 2, 3)),
        (([],), ([9],), ([-3, 2],)),
    ),
    Template(
        ("largest", "maximum", "biggest"),
        """def f(nums):
    out = nums[0]
    for x in nums:
        if x > out:
            out = x
    return out
""",
        faults(
            "comparison: x > out => x < out",
            "variable: return out => return x",
            "bounds: in nums: => in nums[:1]:",
        ),
        args(ints(-9, 8, 2, 4)),
        (([-3],), ([-5, -2, -9],), ([4, 1, 4],)),
    ),
    Template(
        ("smallest", "minimum", "lowest"),
        """def f(nums):
    out = nums[0]
    for x in nums:
        if x < out:
            out = x
    return out
""",
        faults(
            "comparison: x < out => x > out",
            "variable: return out => return x",
            "bounds: in nums: => in nums[:1]:",
        ),
        args(ints(1, 20, 2, 4)),
        (([5],), ([6, 2, 9],), ([4, 1, 4],)),
    ),
    Template(
        ("mean", "average", "avg"),
        """def f(nums):
    out = 0
    for x in nums:
        out += x
    return out / len(nums)
""",
        faults(
            "operator: out / len => out * len",
            "operator: out += x => out -= x",
            "initial: out = 0 => out = 4",
            "bounds: in nums: => in nums[1:]:",
        ),
        exact_mean,
        (([6],), ([-2, 3],), ([1, 2, 3, 5],)),
    ),
    Template(
        ("spread", "value_range", "gap"),
        """def f(nums):
    lo = min(nums)
    hi = max(nums)
    out = hi - lo
    return out
""",
        faults(
            "builtin: min(nums) => max(nums)",
            "builtin: max(nums) => min(nums)",
            "operator: hi - lo => hi + lo",
            "variable: return out => return hi",
        ),
        SOME,
        (([3],), ([-4, 4],), ([9, 9, 8, 1],)),
    ),
    Template(
        ("count_above", "num_above", "count_over"),
        """def f(nums, k):
    out = 0
    for x in nums:
        if x > k:
            out += 1
    return out
""",
        faults(
            "comparison: x > k => x < k",
            "comparison: x > k => x >= k",
            "operator: out += 1 => out -= 1",
            "initial: out = 0 => out = 1",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([5, 6, 4], 4)),
    ),
)
