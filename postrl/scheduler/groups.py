"""Groups and episodes as the scheduler names them: one task, played `group_size` times from different seeds."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from postrl.contracts import Outcome, Task, Trajectory


@dataclass(frozen=True, order=True)
class EpisodeKey:
    """Names one episode within a run; sorts in the order of drawing."""

    phase: str
    """`cold_start`, `rl` or `evaluate:<name>`."""
    step: int
    group: int
    member: int


@dataclass(frozen=True)
class Episode:
    """One episode to play: the task, and the seed that decides every sample in it."""

    key: EpisodeKey
    seed: int
    task: Task


@dataclass(frozen=True)
class Group:
    """One task and its episodes."""

    phase: str
    step: int
    index: int
    task: Task
    episodes: tuple[Episode, ...]


@dataclass(frozen=True)
class RecordedEpisode:
    """An episode that has ended, as the journal holds it."""

    episode: Episode
    attempt: int
    """0 for the first; as many attempts before it were faults of ours."""
    outcome: Outcome
    trajectory: Trajectory | None
    """None: it ended before there was one, or `forget_trajectories` dropped it."""


def episode_seed(run_seed: int, key: EpisodeKey) -> int:
    """The seed of one episode, in [0, 2^31): distinct streams for every phase, step, group and member of a run."""
    text = f"{run_seed}/{key.phase}/{key.step}/{key.group}/{key.member}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


def make_group(phase: str, step: int, index: int, task: Task, group_size: int, run_seed: int) -> Group:
    """The group that plays `task`, its episodes' seeds included; a function of its arguments alone."""
    keys = [EpisodeKey(phase, step, index, member) for member in range(group_size)]
    return Group(phase, step, index, task, tuple(Episode(key, episode_seed(run_seed, key), task) for key in keys))
