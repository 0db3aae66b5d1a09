"""Drawing the arguments that the functions are called with: small, so that a failing call costs few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envs.code_repair.template import Args, Draw

_WORDS = ("cat", "dog", "sun", "red", "tree", "blue", "apple", "river", "cloud", "stone", "go", "up", "ink", "owl")
_LETTERS = "abc"


def args(*draws: Callable[[np.random.Generator], Any]) -> Draw:
    """One argument from each of `draws`."""
    return lambda rng: tuple(draw(rng) for draw in draws)


def ints(low: int, high: int, at_least: int, at_most: int) -> Callable[[np.random.Generator], list[int]]:
    """A list of `at_least` to `at_most` numbers from `low` to `high`."""
    return lambda rng: rng.integers(low, high + 1, size=int(rng.integers(at_least, at_most + 1))).tolist()


def int_in(low: int, high: int) -> Callable[[np.random.Generator], int]:
    """A number from `low` to `high`."""
    return lambda rng: int(rng.integers(low, high + 1))


def word(rng: np.random.Generator) -> str:
    return _WORDS[rng.integers(len(_WORDS))]


def word_list(at_least: int, at_most: int) -> Callable[[np.random.Generator], list[str]]:
    return lambda rng: [word(rng) for _ in range(rng.integers(at_least, at_most + 1))]


def letter_list(rng: np.random.Generator) -> list[str]:
    """A few letters of three, so that some repeat."""
    return [_LETTERS[i] for i in rng.integers(3, size=rng.integers(2, 5))]


def exact_mean(rng: np.random.Generator) -> Args:
    """1, 2 or 4 numbers, whose mean a binary float holds exactly: results are compared without a tolerance."""
    return (rng.integers(1, 10, size=(1, 2, 4)[rng.integers(3)]).tolist(),)


SOME: Draw = args(ints(1, 9, 2, 4))
SOME_AND_ONE: Draw = args(ints(1, 9, 2, 4), int_in(1, 9))
