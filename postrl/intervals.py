"""Confidence intervals for success rates and for the gain between two policies on the same tasks.

Closed forms throughout: the same numbers give the same interval, with no resampling and no seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A rate or a difference of rates, with its confidence interval; fractions, not per cent."""

    value: float
    low: float
    high: float

    @property
    def ci(self) -> tuple[float, float]:
        return (self.low, self.high)


def _quantile(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; it lies strictly between 0 and 1, such as 0.95")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def success_rate(num_successes: int, num_tasks: int, confidence: float = 0.95) -> Estimate:
    """Success rate with its Wilson score interval.

    Unlike the plain normal interval it stays within [0, 1] and keeps its width at 0 and at 1. Source: E. B. Wilson,
    "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). No tasks: [0, 1].
    """
    if not 0 <= num_successes <= num_tasks:
        raise ValueError(f"{num_successes} successes of {num_tasks} tasks; expected 0 <= successes <= tasks")
    z = _quantile(confidence)
    if num_tasks == 0:
        return Estimate(math.nan, 0.0, 1.0)
    rate = num_successes / num_tasks
    scale = 1 + z * z / num_tasks
    center = (rate + z * z / (2 * num_tasks)) / scale
    half = z * math.sqrt(rate * (1 - rate) / num_tasks + z * z / (4 * num_tasks**2)) / scale
    # At 0 and at num_tasks the bound is exactly the rate; rounding would leave 1e-17.
    low = 0.0 if num_successes == 0 else center - half
    high = 1.0 if num_successes == num_tasks else center + half
    return Estimate(rate, low, high)


def _successes(values: Sequence[bool] | np.ndarray, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not np.isin(array, (0, 1)).all():
        raise ValueError(f"{name}: expected one success (0 or 1) a task, got {array.dtype} of shape {array.shape}")
    return array.astype(bool)


def paired_gain(
    before: Sequence[bool] | np.ndarray, after: Sequence[bool] | np.ndarray, confidence: float = 0.95
) -> Estimate:
    """`mean(after) - mean(before)` for two policies on the same tasks in the same order, with its score interval.

    Pairing matters: two policies solve the same easy tasks, and the interval narrows by their correlation. A percentile
    bootstrap would shrink to a point when every pair changes alike (0 of 20 before, 20 of 20 after); this interval
    keeps its width. Source: R. G. Newcombe, "Improved confidence intervals for the difference between binomial
    proportions based on paired data", Statistics in Medicine 17 (1998), method 10. No tasks: [-1, 1].
    """
    x_N, y_N = _successes(before, "before"), _successes(after, "after")
    if len(x_N) != len(y_N):
        raise ValueError(f"{len(x_N)} tasks before and {len(y_N)} after; both must be the same tasks in the same order")
    num_tasks = len(x_N)
    if num_tasks == 0:
        _quantile(confidence)
        return Estimate(math.nan, -1.0, 1.0)
    num_both = int((x_N & y_N).sum())
    num_lost = int((x_N & ~y_N).sum())
    num_won = int((~x_N & y_N).sum())
    num_neither = num_tasks - num_both - num_lost - num_won
    first = success_rate(num_both + num_lost, num_tasks, confidence)
    second = success_rate(num_both + num_won, num_tasks, confidence)

    margins = (num_both + num_lost) * (num_won + num_neither) * (num_both + num_won) * (num_lost + num_neither)
    excess = num_both * num_neither - num_lost * num_won
    if excess > 0:
        # Newcombe's continuity correction of phi, for positive association only.
        excess = max(excess - num_tasks / 2, 0)
    phi = excess / math.sqrt(margins) if margins else 0.0

    def half(first_side: float, second_side: float) -> float:
        square = first_side**2 - 2 * phi * first_side * second_side + second_side**2
        return math.sqrt(max(square, 0.0))

    value = second.value - first.value
    return Estimate(
        value=value,
        low=max(-1.0, value - half(second.value - second.low, first.high - first.value)),
        high=min(1.0, value + half(second.high - second.value, first.value - first.low)),
    )
