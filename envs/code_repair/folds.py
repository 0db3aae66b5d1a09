"""Functions that fold a list of numbers into one."""

from __future__ import annotations

from envs.code_repair.inputs import SOME, SOME_AND_ONE, args, equal_length, exact_mean, ints
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
            "operator: out += x => out *= x",
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
            "operator: out *= x => out += x",
            "operator: out *= x => out -= x",
            "initial: out = 1 => out = 0",
            "initial: out = 1 => out = 2",
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
            "initial: out = nums[0] => out = 9",
            "variable: return out => return x",
            "variable: return out => return nums",
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
            "initial: out = nums[0] => out = 0",
            "variable: return out => return x",
            "variable: return out => return nums",
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
            "operator: out / len => out - len",
            "operator: out += x => out -= x",
            "initial: out = 0 => out = 4",
            "builtin: len(nums) => sum(nums)",
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
            "builtin: max(nums) => len(nums)",
            "operator: hi - lo => hi + lo",
            "variable: hi - lo => lo - hi",
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
            "operator: out += 1 => out += x",
            "initial: out = 0 => out = 1",
            "variable: return out => return k",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([5, 6, 4], 4)),
    ),
    Template(
        ("count_below", "num_below", "count_under"),
        """def f(nums, k):
    out = 0
    for x in nums:
        if x < k:
            out += 1
    return out
""",
        faults(
            "comparison: x < k => x > k",
            "comparison: x < k => x <= k",
            "operator: out += 1 => out -= 1",
            "initial: out = 0 => out = 1",
            "variable: return out => return x",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([5, 3, 4], 4)),
    ),
    Template(
        ("dot", "dot_product", "inner"),
        """def f(nums, more):
    out = 0
    for x, y in zip(nums, more):
        out += x * y
    return out
""",
        faults(
            "operator: x * y => x + y",
            "operator: out += => out -=",
            "initial: out = 0 => out = 1",
            "variable: x * y => x * x",
            "variable: return out => return x",
            "bounds: zip(nums, more) => zip(nums[1:], more)",
        ),
        equal_length,
        (([], []), ([2], [8]), ([1, 0, -2], [3, 5, 4])),
    ),
)
