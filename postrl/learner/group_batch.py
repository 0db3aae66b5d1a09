"""From the ended episodes of a step to one `TrainBatch`, and the figures that say what it holds. Pure numpy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from postrl.contracts import InfraFault, Outcome, Scored, Trajectory, outcome_reward
from postrl.learner.advantages import group_relative
from postrl.learner.batch import Episode, RowShape, TrainBatch, episode, pack


@dataclass(frozen=True)
class EndedEpisode:
    """What the learner needs to know of an episode."""

    domain: str
    outcome: Outcome
    trajectory: Trajectory | None


@dataclass(frozen=True)
class StepData:
    batch: TrainBatch | None
    """None: no group had two different rewards, so there is no gradient."""
    num_informative_groups: int
    num_episodes: int
    oldest_version: int
    """Lowest policy version that sampled a token of the step."""
    fault_messages: tuple[str, ...]
    metrics: dict[str, float]
    """`reward.*`, `success.*` per domain and overall, over valid episodes; counts over all."""


def step_data(
    groups: Sequence[Sequence[EndedEpisode]],
    *,
    normalize_std: bool,
    shapes: Sequence[RowShape],
    max_rows: int,
) -> StepData:
    """Advantages within each group, over its valid members; groups whose rewards are all equal are left out."""
    informative: list[list[Episode]] = []
    num_loss_tokens = 0
    for group in groups:
        rewards = [outcome_reward(e.outcome) for e in group]
        valid_G = np.array([r is not None for r in rewards])
        reward_G = np.array([0.0 if r is None else r for r in rewards], np.float32)
        advantage_G = group_relative(reward_G, valid_G, normalize_std=normalize_std)
        # A member whose advantage is 0 has no gradient: it is left out to save its tokens, but counts in the denominator.
        members = [
            episode(e.trajectory, float(a))
            for e, a in zip(group, advantage_G, strict=True)
            if a != 0 and e.trajectory is not None
        ]
        if members:
            informative.append(members)
            scored = [
                e.trajectory for e, valid in zip(group, valid_G, strict=True) if valid and e.trajectory is not None
            ]
            num_loss_tokens += sum(trajectory.num_policy_tokens for trajectory in scored)
    batch = pack(informative, shapes, max_rows, num_loss_tokens) if informative else None
    ended = [e for group in groups for e in group]
    versions = [t.completion.version_T.min() for e in ended if e.trajectory is not None for t in e.trajectory.turns]
    return StepData(
        batch=batch,
        num_informative_groups=len(informative),
        num_episodes=len(ended),
        oldest_version=int(min(versions, default=-1)),
        fault_messages=tuple(e.outcome.message for e in ended if isinstance(e.outcome, InfraFault)),
        metrics=_metrics(groups, len(informative)),
    )


def _metrics(groups: Sequence[Sequence[EndedEpisode]], num_informative: int) -> dict[str, float]:
    rewards, successes = defaultdict(list), defaultdict(list)
    num_tokens = num_turns = num_tool_calls = num_faults = num_truncated = 0
    for ended in (e for group in groups for e in group):
        reward = outcome_reward(ended.outcome)
        if reward is None:
            num_faults += 1
            continue
        success = isinstance(ended.outcome, Scored) and ended.outcome.verdict.success
        for name in ("mean", ended.domain):
            rewards[name].append(reward)
            successes[name].append(float(success))
        if ended.trajectory is not None:
            num_tokens += ended.trajectory.num_policy_tokens
            num_turns += len(ended.trajectory.turns)
            num_tool_calls += sum(turn.call is not None for turn in ended.trajectory.turns)
            num_truncated += ended.trajectory.truncated
    num_valid = max(1, len(rewards["mean"]))
    return {
        **{f"reward.{name}": float(np.mean(values)) for name, values in sorted(rewards.items()) if values},
        **{f"success.{name}": float(np.mean(values)) for name, values in sorted(successes.items()) if values},
        "groups.informative": num_informative / max(1, len(groups)),
        "tokens.policy": num_tokens,
        "tokens.per_episode": num_tokens / num_valid,
        "turns.per_episode": num_turns / num_valid,
        "tool_calls": num_tool_calls,
        "truncated": num_truncated / num_valid,
        "faults": num_faults,
    }
