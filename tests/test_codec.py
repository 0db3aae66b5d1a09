"""Outcomes and trajectories survive the codec bit for bit, and nothing else decodes."""

import hashlib
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postrl.codec import (
    MAX_ARTIFACT_BYTES,
    artifact_digests,
    decode_outcome,
    decode_trajectory,
    encode_outcome,
    encode_trajectory,
)
from postrl.contracts import Cancelled, Completion, Finding, InfraFault, PolicyFault, Scored, StopReason, Turn, Verdict
from postrl.contracts import TaskDefect as Defect
from tests.sample_episodes import sample_task, sample_trajectory

texts = st.text(st.characters(codec="utf-8"), max_size=20)
fractions = st.floats(0, 1, exclude_max=True)
verdicts = st.builds(
    Verdict,
    reward=fractions,
    success=st.just(False),
    parts=st.dictionaries(texts, fractions, max_size=3),
    findings=st.lists(st.builds(Finding, texts, texts), max_size=3).map(tuple),
    verifier=texts,
)
outcomes = st.one_of(
    st.builds(Scored, verdicts),
    st.builds(PolicyFault, texts),
    st.builds(InfraFault, texts, texts),
    st.builds(Defect, texts),
    st.builds(Cancelled, texts),
)


@given(outcomes)
def test_outcomes_survive(outcome):
    assert decode_outcome(encode_outcome(outcome)) == outcome


def test_unknown_outcome_is_refused():
    with pytest.raises(ValueError, match="'shrug'; known kinds are scored, policy_fault"):
        decode_outcome('{"kind": "shrug"}')


@st.composite
def turns(draw):
    num = draw(st.integers(0, 5))
    bits = draw(st.lists(st.integers(0, 2**32 - 1), min_size=num, max_size=num))
    ints = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=num, max_size=num)
    return Turn(
        prompt_T=np.array(draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)), np.int32),
        completion=Completion(
            np.array(draw(ints), np.int32),
            np.array(bits, np.uint32).view(np.float32),  # NaN payloads, subnormals and infinities included
            np.array(draw(ints), np.int32),
            draw(st.sampled_from(StopReason)),
        ),
        text=draw(texts),
        call=None,
        observation=draw(st.text(max_size=20)),
    )


@given(st.lists(turns(), max_size=3).map(tuple))
def test_arrays_survive_bit_for_bit(turns):
    task = sample_task()
    original = sample_trajectory(task, 1)
    original = type(original)(**{**vars(original), "turns": turns})
    payload = encode_trajectory(original)
    copy = decode_trajectory(payload, task)
    for before, after in zip(original.turns, copy.turns, strict=True):
        assert (before.text, before.call, before.observation) == (after.text, after.call, after.observation)
        assert before.completion.stop is after.completion.stop
        for array, other in [
            (before.prompt_T, after.prompt_T),
            (before.completion.token_T, after.completion.token_T),
            (before.completion.logprob_T, after.completion.logprob_T),
            (before.completion.version_T, after.completion.version_T),
        ]:
            assert array.dtype == other.dtype
            assert array.tobytes() == other.tobytes()
    assert encode_trajectory(copy) == payload
    assert (copy.artifacts, copy.commands) == (original.artifacts, original.commands)


def test_lone_surrogates_from_a_hostile_command_survive():
    task = sample_task()
    trajectory = sample_trajectory(task, 1, text="rm \udcff\x00\u202e")
    copy = decode_trajectory(encode_trajectory(trajectory), task)
    assert copy.turns[0].text == "rm \udcff\x00\u202e 0"


def test_large_artifacts_leave_a_digest_only():
    task = sample_task()
    trajectory = sample_trajectory(task, 1)
    small, large = b"x" * MAX_ARTIFACT_BYTES, b"y" * (MAX_ARTIFACT_BYTES + 1)
    artifacts = {"small": small, "large": large} | {f"z{index}": small for index in range(4)}
    payload = encode_trajectory(type(trajectory)(**{**vars(trajectory), "artifacts": artifacts}))
    # Four of 64 KiB fill the total of 256 KiB: small, z0, z1, z2.
    assert decode_trajectory(payload, task).artifacts == {path: small for path in ("small", "z0", "z1", "z2")}
    assert set(artifact_digests(payload)) == set(artifacts)
    assert artifact_digests(payload)["large"] == hashlib.sha256(large).hexdigest()


def test_wrong_dtype_is_refused_and_not_cast():
    task = sample_task()
    trajectory = sample_trajectory(task, 1, num_turns=1)
    turn = trajectory.turns[0]
    wide = type(turn)(**{**vars(turn), "prompt_T": np.array([1, 2])})
    with pytest.raises(ValueError, match="turn 0 prompt_T: expected a int32 array of rank 1, got int64"):
        encode_trajectory(type(trajectory)(**{**vars(trajectory), "turns": (wide,)}))


def test_unequal_lengths_are_refused():
    task = sample_task()
    trajectory = sample_trajectory(task, 1, num_turns=1)
    turn = trajectory.turns[0]
    short = Completion(np.zeros(2, np.int32), np.zeros(1, np.float32), np.zeros(2, np.int32), StopReason.STOP)
    with pytest.raises(ValueError, match="2 sampled tokens, 1 log-probabilities and 2 versions"):
        encode_trajectory(
            type(trajectory)(**{**vars(trajectory), "turns": (type(turn)(**{**vars(turn), "completion": short}),)})
        )


def test_another_task_or_damage_is_refused():
    task = sample_task(0)
    payload = encode_trajectory(sample_trajectory(task, 1))
    with pytest.raises(ValueError, match="belongs to task shell/count_lines/train-0-0"):
        decode_trajectory(payload, sample_task(1))
    with pytest.raises(ValueError, match="doesn't decompress"):
        decode_trajectory(payload[:-9], task)
    with pytest.raises(ValueError, match="begins with"):
        decode_trajectory(zlib.compress(b"pickle"), task)
    with pytest.raises(ValueError, match="cut short"):
        decode_trajectory(zlib.compress(zlib.decompress(payload)[:-1]), task)
