"""What the device is given: every array of a small mix, by hand; and configs that can't work."""

import numpy as np
import pytest

from postrl.rollout.engine import EngineConfig
from postrl.rollout.step import Span, step_batch

FIELDS = {
    "token_T": np.int32,
    "position_T": np.int32,
    "sequence_T": np.int32,
    "num_tokens": np.int32,
    "table_NP": np.int32,
    "row_R": np.int32,
    "seed_R": np.int32,
    "inverse_temperature_R": np.float32,
    "greedy_R": np.bool_,
    "num_rows": np.int32,
}


def span(tokens, first_position, pages, *, sampled=True, seed=0, temperature=1.0):
    return Span(np.array(tokens, np.int32), first_position, pages, sampled, seed, temperature)


def assert_batch(batch, **wanted):
    for name, dtype in FIELDS.items():
        array = getattr(batch, name)
        assert array.dtype == dtype, name
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def test_a_mix_by_hand():
    """The end of a prompt that crosses into its second page, the middle of another, and a greedy request that runs."""
    batch = step_batch(
        [
            span([7, 8, 9], 15, [4, 2], seed=5, temperature=0.5),
            span([1, 3], 32, (6, 5, 3), sampled=False, seed=9, temperature=0.25),
            span([6], 2, [1], seed=8, temperature=0.0),
        ],
        num_tokens=9,
        num_sequences=4,
        num_pages=3,
    )
    assert_batch(
        batch,
        token_T=[7, 8, 9, 1, 3, 6, 0, 0, 0],
        position_T=[15, 16, 17, 32, 33, 2, 0, 0, 0],
        sequence_T=[0, 0, 0, 1, 1, 2, -1, -1, -1],
        num_tokens=6,
        table_NP=[[4, 2, 0], [6, 5, 3], [1, 0, 0], [0, 0, 0]],
        row_R=[2, 5, 0, 0],  # the second span samples nothing
        seed_R=[5, 8, 0, 0],
        inverse_temperature_R=[2, 1, 1, 1],
        greedy_R=[False, True, False, False],
        num_rows=2,
    )


def test_a_full_batch_has_no_padding():
    batch = step_batch([span([3], 0, [1]), span([4, 5], 7, [0])], num_tokens=3, num_sequences=2, num_pages=1)
    assert_batch(
        batch,
        token_T=[3, 4, 5],
        position_T=[0, 7, 8],
        sequence_T=[0, 1, 1],
        num_tokens=3,
        table_NP=[[1], [0]],
        row_R=[0, 2],
        seed_R=[0, 0],
        inverse_temperature_R=[1, 1],
        greedy_R=[False, False],
        num_rows=2,
    )


def test_nothing_is_all_padding():
    batch = step_batch([], num_tokens=2, num_sequences=1, num_pages=2)
    assert_batch(
        batch,
        token_T=[0, 0],
        position_T=[0, 0],
        sequence_T=[-1, -1],
        num_tokens=0,
        table_NP=[[0, 0]],
        row_R=[0],
        seed_R=[0],
        inverse_temperature_R=[1],
        greedy_R=[False],
        num_rows=0,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_pages": 4},
            r"num_pages 4 hold 64 tokens, fewer than one request may have \(max_context 65\)",
        ),
        (
            {"max_step_tokens": 9},
            "max_step_tokens 9 must be at least max_requests 10: a step computes one token for each running request",
        ),
    ],
)
def test_impossible_configs_are_refused(change, message):
    smallest = {"max_requests": 10, "max_context": 65, "num_pages": 5, "max_step_tokens": 10}
    EngineConfig(**smallest)
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{**smallest, **change})
