"""The configuration of a run: frozen dataclasses, a few dozen leaf fields, every one with its meaning and unit.

An experiment is a function that returns a `RunConfig`; `tyro` turns it into a command line once, in the experiment's
`main` (`--rl.learning-rate 3e-4`). Variants are values (`loss=PolicyGradient(clip_low=0.1)`), never names in a registry.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from postrl.contracts import digest_json
from postrl.learner.batch import RowShape
from postrl.learner.losses import PolicyGradient
from postrl.rollout.engine import EngineConfig


@dataclass(frozen=True)
class TrainableConfig:
    """What is trained. The base stays frozen unless `lora_rank` is 0."""

    lora_rank: int = 64
    """Rank of the adapter on every linear map; 0 trains the base's own parameters instead."""
    lora_alpha: float = 64.0
    """The adapter is scaled by alpha / rank."""


@dataclass(frozen=True)
class ColdStartConfig:
    """A short supervised phase on reference trajectories, so that reinforcement learning finds first successes."""

    num_epochs: int = 2
    batch_size: int = 16
    """Demonstrations a step."""
    learning_rate: float = 1.5e-3
    """The peak, after a tenth of the steps; it falls to 0 along a cosine."""


@dataclass(frozen=True)
class RlConfig:
    num_steps: int = 36
    group_size: int = 6
    """Episodes of each task."""
    learning_rate: float = 2e-4
    num_warmup_steps: int = 3
    """Steps over which the learning rate rises linearly from 0."""
    num_decay_steps: int = 0
    """Last steps, over which it falls linearly to 0."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); False: Dr.GRPO."""
    loss: PolicyGradient = field(default_factory=PolicyGradient)
    temperature: float = 1.0
    max_off_policy_steps: int = 0
    """How many versions older than the learner's a trained token may be. 0: synchronous, the only mode so far."""
    max_steps_without_signal: int = 5
    """The audit stops the run after so many steps in a row in which every group's rewards were constant."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"rl.group_size is {self.group_size}; a group needs at least 2 members to compare")
        if self.num_warmup_steps + self.num_decay_steps > self.num_steps:
            raise ValueError(
                f"rl.num_warmup_steps {self.num_warmup_steps} and rl.num_decay_steps {self.num_decay_steps} must fit into "
                f"rl.num_steps {self.num_steps}"
            )
        if self.max_off_policy_steps != 0:
            raise ValueError(
                f"rl.max_off_policy_steps is {self.max_off_policy_steps}; only 0 (synchronous) is supported"
            )
        if self.temperature <= 0:
            raise ValueError(f"rl.temperature is {self.temperature}; it must be positive (greedy groups teach nothing)")


@dataclass(frozen=True)
class DomainConfig:
    """How much of a domain a run takes."""

    num_demonstrations: int = 64
    """Reference trajectories for the cold start."""
    groups_per_step: int = 4
    """Tasks a step of reinforcement learning."""
    num_heldout: int = 40
    """Held-out tasks of an evaluation, each played once, greedily."""


@dataclass(frozen=True)
class LearnerConfig:
    row_shapes: tuple[RowShape, ...] = (RowShape(384, 192), RowShape(640, 400))
    """Shapes of packed rows; a batch takes the one that wastes least, and each is compiled once."""
    max_rows: int = 48
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class RolloutConfig:
    engine: EngineConfig = field(default_factory=EngineConfig)
    max_new_tokens: int = 32
    """Of one completion."""
    max_turns: int = 2
    """Of an episode; its task may allow fewer."""
    max_attempts: int = 3
    """Attempts at an episode that fails through our own fault."""
    max_fault_rate: float = 0.1
    """The audit stops the run when more than this share of a step's episodes end in a fault of ours."""


@dataclass(frozen=True)
class RunConfig:
    name: str
    """Names the run directory below `runs_dir`."""
    seed: int = 0
    runs_dir: Path = Path("runs")
    wandb_project: str = "postrl"
    checkpoint_every: int = 5
    """Steps of reinforcement learning between checkpoints."""
    domains: dict[str, DomainConfig] = field(default_factory=dict)
    """By name; at least one. The experiment's `Parts` bring the domains of these names."""
    trainable: TrainableConfig = field(default_factory=TrainableConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)

    def __post_init__(self) -> None:
        if not self.domains:
            raise ValueError("domains is empty; name at least one, such as {'shell': DomainConfig()}")
        num_episodes = sum(d.groups_per_step for d in self.domains.values()) * self.rl.group_size
        if num_episodes < 1:
            raise ValueError("no domain has groups_per_step > 0, so a step would have no episodes")

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    def to_json(self) -> dict[str, Any]:
        return _json_like(dataclasses.asdict(self))

    @property
    def fingerprint(self) -> str:
        """What decides the run's result: everything but where it is written."""
        return digest_json({k: v for k, v in self.to_json().items() if k not in ("name", "runs_dir", "wandb_project")})[
            :16
        ]


def num_leaf_fields(config: Any) -> int:
    """Fields that a user could set, nested dataclasses counted by their own fields."""
    values = [getattr(config, f.name) for f in dataclasses.fields(config)]
    # Every domain takes the same fields, however many domains there are.
    values = [next(iter(v.values())) if isinstance(v, dict) and v else v for v in values]
    return sum(num_leaf_fields(v) if dataclasses.is_dataclass(v) else 1 for v in values)


def _json_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_like(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_like(v) for v in value]
    return str(value) if isinstance(value, Path) else value
