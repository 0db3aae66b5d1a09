"""Advantages by hand."""

import numpy as np
import pytest

from postrl.learner.advantages import group_relative

ALL = np.ones(4, bool)


def test_grpo_by_hand():
    """Rewards 1, 0, 0, 1: mean 1/2, population deviation 1/2."""
    got = group_relative(np.array([1.0, 0, 0, 1], np.float32), ALL, normalize_std=True, eps=0.0)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [1, -1, -1, 1], rtol=1e-6)


def test_uneven_rewards_by_hand():
    """1, 0, 0, 0: mean 1/4, variance 3/16."""
    got = group_relative(np.array([1.0, 0, 0, 0]), ALL, normalize_std=True, eps=0.0)
    np.testing.assert_allclose(got, np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-6)


def test_dr_grpo_only_centres():
    got = group_relative(np.array([1.0, 0, 0, 0]), ALL, normalize_std=False)
    np.testing.assert_allclose(got, [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_eps_is_added_to_the_deviation():
    got = group_relative(np.array([1.0, 0, 0, 1]), ALL, normalize_std=True, eps=0.5)
    np.testing.assert_allclose(got, [0.5, -0.5, -0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("junk", [0.0, 1.0, -1e6, np.nan, np.inf])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_invalid_members_shift_nothing(junk, normalize_std):
    valid = np.array([True, False, True, True])
    got = group_relative(np.array([1.0, junk, 0, 0]), valid, normalize_std=normalize_std)
    without = group_relative(np.array([1.0, 0, 0]), np.ones(3, bool), normalize_std=normalize_std)
    np.testing.assert_array_equal(got[valid], without)
    assert got[1] == 0
    np.testing.assert_allclose(without.sum(), 0, atol=1e-6)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        ([0.3, 0.3, 0.3, 0.3], [1, 1, 1, 1]),
        ([1, 1, 0, 1], [1, 1, 0, 1]),
        ([1, 0, 0, 0], [1, 0, 0, 0]),
        ([1, 0, 1, 0], [0, 0, 0, 0]),
    ],
)
def test_nothing_to_prefer_is_exactly_zero(rewards, valid, normalize_std):
    """Constant rewards, one valid member, none: 0, not noise divided by a tiny deviation."""
    got = group_relative(np.array(rewards, np.float32), np.array(valid, bool), normalize_std=normalize_std)
    assert not got.any()
