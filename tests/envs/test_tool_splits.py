"""Splits by content: every task in its own, whatever the seed, and an error where a generator has too few contents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.splits import draw, split_of
from postrl.contracts import Task


def make(split, seed, index, num_prompts=1_000, num_files=1_000):
    def task(rng):
        prompt, data = f"p{rng.integers(num_prompts)}", b"%d" % rng.integers(num_files)
        return Task("toy", "k", split, seed, index, "S", prompt, {"a": data}, {}, ())

    return task


def drawn(split, seed, index, by_prompt=False, **sizes):
    return draw("toy", split, seed, index, make(split, seed, index, **sizes), by_prompt=by_prompt)


@settings(max_examples=50)
@given(st.sampled_from(["train", "heldout"]), st.integers(0, 2**64), st.integers(0, 2**64), st.booleans())
def test_a_task_falls_into_the_split_it_was_drawn_for_and_is_reproducible(split, seed, index, by_prompt):
    task = drawn(split, seed, index, by_prompt)
    assert split_of(task, by_prompt=by_prompt) == split
    assert task == drawn(split, seed, index, by_prompt)


def test_a_quarter_is_held_out():
    tasks = [make("train", 0, index)(np.random.default_rng(index)) for index in range(2_000)]
    for by_prompt in (False, True):
        share = sum(split_of(task, by_prompt=by_prompt) == "heldout" for task in tasks) / len(tasks)
        assert 0.2 < share < 0.3


def test_the_split_of_a_content_depends_on_neither_seed_nor_index_nor_kind():
    for by_prompt in (False, True):
        names = [(seed, index) for seed in range(3) for index in range(300)]
        train = {drawn("train", seed, index, by_prompt).content_digest for seed, index in names}
        heldout = {drawn("heldout", seed + 3, index, by_prompt).content_digest for seed, index in names}
        assert not train & heldout


def test_by_prompt_no_prompt_is_shared():
    train = {drawn("train", 0, index, by_prompt=True, num_prompts=50).prompt for index in range(300)}
    heldout = {drawn("heldout", 0, index, by_prompt=True, num_prompts=50).prompt for index in range(300)}
    assert train
    assert heldout
    assert not train & heldout
    assert {drawn("train", 0, index, num_prompts=50).prompt for index in range(300)} & heldout


def test_an_exhausted_space_is_an_error_that_says_what_to_do():
    only = make("train", 0, 0, num_prompts=1, num_files=1)(np.random.default_rng(0))
    other = "heldout" if split_of(only) == "train" else "train"
    with pytest.raises(ValueError, match="give it more names, values or phrasings"):
        drawn(other, 0, 0, num_prompts=1, num_files=1)
