"""From typed outcomes to a batch and the figures of a step."""

import numpy as np
import pytest

from postrl.contracts import (
    Cancelled,
    Completion,
    InfraFault,
    PolicyFault,
    Scored,
    StopReason,
    TaskDefect,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)
from postrl.learner.batch import RowShape
from postrl.learner.group_batch import EndedEpisode, step_data
from tests.learner.grouped import loss_tokens_in
from tests.sample_episodes import sample_task

SHAPES = (RowShape(32, 16),)


def played(token: int, *, num_turns: int = 1, version: int = 4, truncated: bool = False) -> Trajectory:
    """A prompt of tokens 1, 2; each turn samples `token` and 50."""
    turns = tuple(
        Turn(
            prompt_T=np.array([1, 2] if k == 0 else [3], np.int32),
            completion=Completion(
                np.array([token, 50], np.int32),
                np.array([-0.5, -0.25], np.float32),
                np.array([version + k, version + k], np.int32),
                StopReason.STOP,
            ),
            text="",
            call=ToolCall("sh", (), "") if k == 0 else None,
            observation="",
        )
        for k in range(num_turns)
    )
    return Trajectory(sample_task(), 0, turns, not truncated, truncated, {}, (), 0.0)


def scored(reward: float, token: int, domain: str = "shell", **kwargs) -> EndedEpisode:
    return EndedEpisode(domain, Scored(Verdict(reward, reward == 1, {}, (), "v@1")), played(token, **kwargs))


def ended(outcome, domain: str = "shell") -> EndedEpisode:
    return EndedEpisode(domain, outcome, None)


def data_of(groups, *, normalize_std=False):
    return step_data(groups, normalize_std=normalize_std, shapes=SHAPES, max_rows=4)


def advantages(batch) -> dict[int, float]:
    """By the first sampled token of each episode; every loss token of an episode has the episode's advantage."""
    return {target: advantage for _, target, _, advantage in loss_tokens_in(batch) if target != 50}


def test_advantages_by_hand():
    group = [scored(1.0, 11), scored(0.5, 12), scored(0.0, 13)]
    batch = data_of([group]).batch
    assert advantages(batch) == {11: 0.5, 13: -0.5}  # the middle one is at the mean: no gradient
    assert batch.num_loss_tokens == 6  # but it counts: a step weighs its tokens alike, whichever are learned from
    normalized = advantages(data_of([group], normalize_std=True).batch)
    np.testing.assert_allclose([normalized[11], normalized[13]], [1.224745, -1.224745], atol=1e-5)


@pytest.mark.parametrize("outcome", [InfraFault("verify", "no sandbox"), TaskDefect("bad"), Cancelled("stopped")])
def test_what_is_not_the_policys_doing_shifts_nothing(outcome):
    data = data_of([[scored(1.0, 11), ended(outcome), scored(0.0, 13)]])
    assert advantages(data.batch) == {11: 0.5, 13: -0.5}
    assert data.metrics["reward.mean"] == 0.5
    assert data.metrics["faults"] == 1
    assert data.num_episodes == 3
    assert data.fault_messages == (("no sandbox",) if isinstance(outcome, InfraFault) else ())


def test_a_policy_fault_counts_as_zero():
    """It pulls the mean down even though it left nothing to train on."""
    data = data_of([[scored(1.0, 11), ended(PolicyFault("disk")), scored(1.0, 13), scored(1.0, 14)]])
    assert advantages(data.batch) == {11: 0.25, 13: 0.25, 14: 0.25}
    assert (data.metrics["reward.mean"], data.metrics["success.mean"], data.metrics["faults"]) == (0.75, 0.75, 0)


def test_constant_groups_are_left_out():
    flat = [scored(0.5, 21), scored(0.5, 22)]
    data = data_of([flat, [scored(1.0, 11), scored(0.0, 12)], [ended(InfraFault("s", "m")), scored(1.0, 23)]])
    assert set(advantages(data.batch)) == {11, 12}
    assert data.num_informative_groups == 1
    assert data.metrics["groups.informative"] == pytest.approx(1 / 3)
    assert data_of([flat]).batch is None


def test_groups_do_not_mix():
    """Each group is compared with itself: the worst of an easy task may beat the best of a hard one."""
    easy, hard = [scored(1.0, 11), scored(0.75, 12)], [scored(0.25, 13), scored(0.0, 14)]
    assert advantages(data_of([easy, hard]).batch) == {11: 0.125, 12: -0.125, 13: 0.125, 14: -0.125}


def test_figures_by_hand():
    groups = [
        [scored(1.0, 11, num_turns=2), scored(0.0, 12, truncated=True)],
        [scored(0.5, 13, domain="code"), ended(InfraFault("verify", "m"), domain="code")],
    ]
    data = data_of(groups)
    assert data.metrics == {
        "reward.mean": 0.5,
        "reward.shell": 0.5,
        "reward.code": 0.5,
        "success.mean": pytest.approx(1 / 3),
        "success.shell": 0.5,
        "success.code": 0.0,
        "groups.informative": 0.5,
        "tokens.policy": 8,
        "tokens.per_episode": pytest.approx(8 / 3),
        "turns.per_episode": pytest.approx(4 / 3),
        "tool_calls": 3,
        "truncated": pytest.approx(1 / 3),
        "faults": 1,
    }
    assert (data.num_episodes, data.fault_messages) == (4, ("m",))


def test_the_oldest_version_of_any_token():
    assert data_of([[scored(1.0, 11, version=6), scored(0.0, 12, version=3, num_turns=2)]]).oldest_version == 3
    assert data_of([[ended(InfraFault("s", "m"))]]).oldest_version == -1
