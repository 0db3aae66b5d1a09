"""Packing: nothing is lost, nothing doubled, and every loss token sees its own history and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.contracts import Completion, StopReason, Turn
from postrl.learner.batch import Row, RowShape, empty_batch, episode, pack, shared_length
from tests.learner.grouped import loss_tokens_in, loss_tokens_of, make_episode
from tests.sample_episodes import sample_task, sample_trajectory

tokens = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@st.composite
def groups(draw):
    """One to four groups of one to five members of one to three turns; log-probabilities are unique."""
    next_id, drawn = 0, []
    for _ in range(draw(st.integers(1, 4))):
        prompt, members = draw(tokens), []
        for _ in range(draw(st.integers(1, 5))):
            num_turns = draw(st.integers(1, 3))
            own = draw(st.lists(st.integers(1, 60), max_size=2))  # prompts of a group may differ at the end
            observations = [prompt + own] + [draw(tokens) for _ in range(num_turns - 1)]
            turns = [(observation, draw(tokens)) for observation in observations]
            members.append(make_episode(turns, first_id=next_id, advantage=draw(st.sampled_from([-1.5, 0.25, 2.0]))))
            next_id += len(members[-1].token_T)
        drawn.append(members)
    return drawn


SHAPES = (RowShape(24, 12), RowShape(40, 30), RowShape(64, 24))


@settings(deadline=None)
@given(groups(), st.sampled_from([SHAPES, SHAPES[1:], SHAPES[:1], SHAPES[2:]]))
def test_every_loss_token_appears_once_with_its_own_history(drawn, shapes):
    fits = [
        all(len(e.token_T) <= s.num_tokens and e.sampled_T.sum() <= s.num_targets for group in drawn for e in group)
        for s in shapes
    ]
    if not any(fits):
        with pytest.raises(ValueError, match="fit none of the row shapes"):
            pack(drawn, shapes, max_rows=20)
        return
    batch = pack(drawn, shapes, max_rows=20)
    assert loss_tokens_in(batch) == loss_tokens_of(drawn)
    assert batch.num_loss_tokens == sum(int(e.sampled_T.sum()) for group in drawn for e in group)
    check_structure(batch, shapes)


def check_structure(batch, shapes):
    rows = batch.rows
    T, N = rows.token_T.shape[1], rows.target_N.shape[1]
    assert RowShape(T, N) in shapes
    assert {getattr(rows, f).shape[0] for f in Row.__dataclass_fields__} == {20}
    assert not rows.mask_N[batch.num_rows :].any()
    assert not rows.segment_T[batch.num_rows :].any()
    assert rows.mask_N[: batch.num_rows].any(axis=1).all()
    for r in range(int(batch.num_rows)):
        segment, parent = rows.segment_T[r], rows.parent_T[r]
        used = int((segment > 0).sum())
        assert (segment[:used] > 0).all()  # padding only at the end
        assert (parent[used:] == -1).all()
        assert (np.diff(segment[:used]) >= 0).all()  # each segment in one piece
        for s in np.unique(segment[:used]):
            assert len(np.unique(parent[segment == s])) == 1
            of_parent = parent[segment == s][0]
            assert of_parent == -1 or (of_parent < s and not np.any(parent[segment == of_parent] != -1))


def test_a_group_by_hand():
    """A prompt of two tokens, two episodes; the second has two turns."""
    first = make_episode([([7, 8], [1, 2])], first_id=0, advantage=0.5)
    second = make_episode([([7, 8], [3]), ([9], [4, 5])], first_id=10, advantage=-0.5)
    batch = pack([[first, second]], [RowShape(10, 6)], max_rows=2)
    row = Row(*(getattr(batch.rows, f)[0] for f in Row.__dataclass_fields__))
    np.testing.assert_array_equal(row.token_T, [7, 8, 1, 2, 3, 9, 4, 5, 0, 0])
    np.testing.assert_array_equal(row.position_T, [0, 1, 2, 3, 2, 3, 4, 5, 0, 0])
    np.testing.assert_array_equal(row.segment_T, [1, 1, 2, 2, 3, 3, 3, 3, 0, 0])
    np.testing.assert_array_equal(row.parent_T, [-1, -1, 1, 1, 1, 1, 1, 1, -1, -1])
    np.testing.assert_array_equal(row.mask_N, [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(row.source_N[:5], [1, 2, 1, 5, 6])
    np.testing.assert_array_equal(row.target_N[:5], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(row.sampled_logprob_N[:5], [-1, -2, -11, -12, -13])
    np.testing.assert_array_equal(row.advantage_N[:5], [0.5, 0.5, -0.5, -0.5, -0.5])
    assert (batch.num_rows, batch.num_loss_tokens) == (1, 5)
    assert batch.rows.token_T.shape == (2, 10)


def test_a_group_that_does_not_fit_repeats_its_prompt():
    members = [make_episode([([7, 8, 9], [i, i])], first_id=10 * i) for i in range(1, 6)]
    batch = pack([members], [RowShape(7, 100)], max_rows=4)
    assert batch.num_rows == 3
    assert np.sum(batch.rows.token_T == 9) == 3
    by_targets = pack([members], [RowShape(100, 4)], max_rows=4)
    assert by_targets.num_rows == 3
    assert loss_tokens_in(batch) == loss_tokens_in(by_targets) == loss_tokens_of([members])


def test_the_shape_that_wastes_least_is_taken():
    """Two groups of 8 tokens: one row of 16 beats two of 10; of equal sums the smaller rows win."""
    pair = [[make_episode([([i] * 6, [1, 1])])] for i in (1, 2)]
    assert pack(pair, [RowShape(10, 8), RowShape(16, 8)], max_rows=2).rows.token_T.shape == (2, 16)
    assert pack(pair, [RowShape(16, 8), RowShape(8, 8)], max_rows=2).rows.token_T.shape == (2, 8)
    assert pack(pair, [RowShape(16, 8), RowShape(8, 8)], max_rows=1).rows.token_T.shape == (1, 16)


def test_what_fits_nothing_is_said_with_numbers():
    long = make_episode([([1] * 20, [2] * 3)])
    with pytest.raises(
        ValueError, match=r"1 episodes \(the longest of 23 tokens\).*num_tokens=22.*at most 4 rows.*learner"
    ):
        pack([[long]], [RowShape(22, 8)], max_rows=4)
    with pytest.raises(ValueError, match="longest of 23 tokens"):
        pack([[long]], [RowShape(64, 2)], max_rows=4)
    with pytest.raises(ValueError, match=r"5 episodes .* in at most 4 rows"):
        pack([[long]] * 5, [RowShape(23, 8)], max_rows=4)


@pytest.mark.parametrize(
    ("members", "length"),
    [
        ([[([1, 2, 3], [4])]], 3),
        ([[([1, 2, 3], [4])], [([1, 2, 3], [5, 6])]], 3),
        ([[([1, 2, 3], [4])], [([1, 2, 9, 3], [4])]], 2),
        ([[([1, 2, 3], [4])], [([1, 2], [3, 4])]], 2),  # 3 is observed by one and sampled by the other
        ([[([1, 2], [4])], [([2, 1], [4])]], 0),
    ],
)
def test_shared_length_by_hand(members, length):
    assert shared_length([make_episode(turns) for turns in members]) == length


def test_a_trajectory_becomes_an_episode():
    trajectory = sample_trajectory(sample_task(), 3, num_turns=2)
    made = episode(trajectory, 0.5)
    first, second = trajectory.turns
    parts = [first.prompt_T, first.completion.token_T, second.prompt_T, second.completion.token_T]
    np.testing.assert_array_equal(made.token_T, np.concatenate(parts))
    np.testing.assert_array_equal(made.sampled_T, np.repeat([False, True, False, True], [len(p) for p in parts]))
    wanted = np.concatenate([first.completion.logprob_T, second.completion.logprob_T])
    np.testing.assert_array_equal(made.logprob_T[made.sampled_T], wanted)
    assert not made.logprob_T[~made.sampled_T].any()
    assert made.advantage == 0.5
    assert isinstance(first, Turn)
    assert isinstance(first.completion, Completion)
    assert first.completion.stop is StopReason.STOP


def test_an_empty_batch_has_the_shape_and_nothing_in_it():
    empty, full = (
        empty_batch(RowShape(10, 6), 3),
        pack([[make_episode([([1, 2], [3])])]], [RowShape(10, 6)], max_rows=3),
    )
    for field in Row.__dataclass_fields__:
        a, b = getattr(empty.rows, field), getattr(full.rows, field)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert (empty.num_rows, empty.num_loss_tokens, empty.rows.mask_N.any()) == (0, 0, False)
