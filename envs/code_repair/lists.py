"""Functions that search or rebuild lists of numbers."""

from __future__ import annotations

from envs.code_repair.inputs import SOME, SOME_AND_ONE, args, equal_length, ints, ints_and_member, some_rows
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
            "builtin: out.append(x) => out.remove(x)",
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
            "comparison: == 0 => > 0",
            "operator: x % 2 => x // 2",
            "operator: x % 2 => x * 2",
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
            "builtin: any(out) => sum(out)",
            "builtin: append(x > k) => remove(x > k)",
            "comparison: x > k => x < k",
            "comparison: x > k => x != k",
            "initial: out = [] => out = [True]",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([1, 9], 4), ([1, 2], 4)),
    ),
    Template(
        ("all_below", "every_below", "each_below"),
        """def f(nums, k):
    out = []
    for x in nums:
        out.append(x < k)
    return all(out)
""",
        faults(
            "builtin: all(out) => any(out)",
            "builtin: all(out) => sum(out)",
            "comparison: x < k => x > k",
            "comparison: x < k => x != k",
            "initial: out = [] => out = [False]",
        ),
        SOME_AND_ONE,
        (([], 3), ([4, 4], 4), ([1, 9], 4), ([1, 2], 4)),
    ),
    Template(
        ("flatten", "merge_rows", "concat"),
        """def f(rows):
    out = []
    for row in rows:
        out.extend(row)
    return out
""",
        faults(
            "builtin: extend => append",
            "builtin: extend => remove",
            "variable: extend(row) => extend(rows)",
            "variable: return out => return row",
            "bounds: in rows: => in rows[1:]:",
            "bounds: in rows: => in rows[:-1]:",
            "initial: out = [] => out = [0]",
        ),
        some_rows,
        (([],), ([[4, 5]],), ([[1], [], [2]],)),
    ),
    Template(
        ("find", "index_of", "position"),
        """def f(nums, goal):
    for i in range(len(nums)):
        if nums[i] == goal:
            return i
    return -1
""",
        faults(
            "comparison: nums[i] == goal => nums[i] != goal",
            "comparison: nums[i] == goal => nums[i] > goal",
            "variable: return i => return goal",
            "variable: return i => return nums[i]",
            "bounds: range(len(nums)) => range(1, len(nums))",
            "bounds: range(len(nums)) => range(len(nums) - 1)",
            "builtin: range(len(nums)) => range(min(nums))",
        ),
        ints_and_member,
        (([], 3), ([4], 4), ([1, 2], 9), ([3, 8, 1], 1)),
    ),
    Template(
        ("pair_max", "max_each", "larger_each"),
        """def f(nums, more):
    out = []
    for x, y in zip(nums, more):
        out.append(max(x, y))
    return out
""",
        faults(
            "builtin: max(x, y) => min(x, y)",
            "builtin: append => extend",
            "variable: max(x, y) => max(x, x)",
            "variable: return out => return nums",
            "bounds: zip(nums, more) => zip(nums[1:], more)",
            "initial: out = [] => out = [0]",
        ),
        equal_length,
        (([], []), ([2], [8]), ([1, 0, -2], [3, 5, -4])),
    ),
    Template(
        ("running_sum", "cumulative", "prefix_sums"),
        """def f(nums):
    out = []
    n = 0
    for x in nums:
        n += x
        out.append(n)
    return out
""",
        faults(
            "operator: n += x => n -= x",
            "operator: n += x => n *= x",
            "initial: n = 0 => n = 1",
            "variable: append(n) => append(x)",
            "variable: return out => return nums",
            "builtin: append => extend",
            "bounds: in nums: => in nums[1:]:",
        ),
        SOME,
        (([],), ([7],), ([-2, 2, -5],)),
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
            "comparison: not in out => not in nums",
            "builtin: append => extend",
            "builtin: append => remove",
            "initial: out = [] => out = [0]",
            "variable: return out => return nums",
        ),
        args(ints(1, 3, 3, 5)),
        (([],), ([7],), ([5, 5, 5],), ([2, 1, 2],)),
    ),
)
