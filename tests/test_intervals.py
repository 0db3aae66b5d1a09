"""Intervals against values worked out by hand or published, and their coverage by exact enumeration."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.intervals import paired_gain, success_rate


def test_wilson_by_hand():
    # z = 1.959964, z^2 = 3.841459; 5 of 10: center 0.5, half = z sqrt(0.025 + z^2 / 400) / (1 + z^2 / 10) = 0.263407.
    estimate = success_rate(5, 10)
    assert estimate.value == 0.5
    assert estimate.ci == pytest.approx((0.236593, 0.763407), abs=1e-6)
    # 0 of n: [0, z^2 / (n + z^2)]; for n = 60 that is 3.841459 / 63.841459 = 0.060172.
    assert success_rate(0, 60).ci == pytest.approx((0.0, 0.060172), abs=1e-6)
    # Newcombe 1998 (two-sided intervals for the single proportion), table I, method 3: 81 of 263 and 1 of 29.
    assert success_rate(81, 263).ci == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert success_rate(1, 29).ci == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_wilson_edges():
    assert success_rate(0, 60).low == 0.0
    assert success_rate(60, 60).high == 1.0
    empty = success_rate(0, 0)
    assert math.isnan(empty.value)
    assert empty.ci == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2 tasks"):
        success_rate(3, 2)
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        success_rate(1, 2, confidence=95)


@given(st.integers(0, 300), st.integers(1, 300))
def test_wilson_contains_the_rate_and_mirrors(successes, tasks):
    successes = min(successes, tasks)
    estimate, mirror = success_rate(successes, tasks), success_rate(tasks - successes, tasks)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert (1 - mirror.high, 1 - mirror.low) == pytest.approx(estimate.ci, abs=1e-12)


def pairs(both: int, lost: int, won: int, neither: int):
    before = [1] * both + [1] * lost + [0] * won + [0] * neither
    after = [1] * both + [0] * lost + [1] * won + [0] * neither
    return np.array(before, bool), np.array(after, bool)


def test_paired_gain_by_hand():
    # 20 tasks: 4 solved by both, 1 lost, 9 won, 6 by neither. Rates 5/20 and 13/20, gain 0.4.
    # Wilson: 5/20 -> (0.111862, 0.468704), 13/20 -> (0.432854, 0.818806).
    # phi: ad - bc = 4*6 - 1*9 = 15, less n/2 = 10 leaves 5; / sqrt(5*15*13*7) = 5 / 82.6136 = 0.060523.
    # low = 0.4 - sqrt(0.217146^2 - 2*phi*0.217146*0.218704 + 0.218704^2) = 0.4 - 0.298722
    # high = 0.4 + sqrt(0.168806^2 - 2*phi*0.168806*0.138138 + 0.138138^2) = 0.4 + 0.211554
    estimate = paired_gain(*pairs(4, 1, 9, 6))
    assert estimate.value == pytest.approx(0.4)
    assert estimate.ci == pytest.approx((0.101278, 0.611554), abs=3e-6)


def test_paired_gain_published():
    # Newcombe 1998 (paired data), table III: 36, 12, 2, 0 -> method 10 gives 0.0569 to 0.3404 for first minus second.
    before, after = pairs(36, 12, 2, 0)
    assert paired_gain(after, before).ci == pytest.approx((0.0569, 0.3404), abs=5e-5)


def test_paired_gain_keeps_its_width_when_all_change():
    estimate = paired_gain(*pairs(0, 0, 20, 0))
    assert estimate.value == 1.0
    assert estimate.high == 1.0
    assert 0.7 < estimate.low < 0.8  # 1 - sqrt(2) * 3.841459 / 23.841459 = 0.772139
    assert estimate.low == pytest.approx(0.772139, abs=1e-5)


def test_paired_gain_refuses_other_tasks():
    with pytest.raises(ValueError, match="3 tasks before and 2 after"):
        paired_gain([1, 0, 1], [1, 0])
    with pytest.raises(ValueError, match="before: expected one success"):
        paired_gain([0.5, 1.0], [1, 0])
    assert paired_gain([], []).ci == (-1.0, 1.0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60), st.randoms())
def test_paired_gain_algebra(rows, random):
    before, after = zip(*rows, strict=True)
    estimate = paired_gain(before, after)
    assert -1 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1
    reverse = paired_gain(after, before)
    assert (-reverse.high, -reverse.low) == pytest.approx(estimate.ci, abs=1e-12)
    shuffled = random.sample(rows, len(rows))
    assert paired_gain(*zip(*shuffled, strict=True)) == estimate


@pytest.mark.parametrize("rates", [(0.3, 0.05, 0.4, 0.25), (0.02, 0.01, 0.7, 0.27), (0.25, 0.25, 0.25, 0.25)])
def test_paired_gain_covers_the_truth(rates):
    """Exact coverage for 24 tasks: every table's probability, summed where the interval holds the true gain."""
    num_tasks, truth, covered = 24, rates[2] - rates[1], 0.0
    for both, lost, won in itertools.product(range(num_tasks + 1), repeat=3):
        neither = num_tasks - both - lost - won
        if neither < 0:
            continue
        counts = (both, lost, won, neither)
        log_ways = math.lgamma(num_tasks + 1) - sum(math.lgamma(count + 1) for count in counts)
        probability = math.exp(log_ways + sum(n * math.log(rate) for n, rate in zip(counts, rates, strict=True)))
        if probability < 1e-7:
            continue
        estimate = paired_gain(*pairs(*counts))
        covered += probability * (estimate.low <= truth <= estimate.high)
    assert covered > 0.935
