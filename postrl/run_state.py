"""What a run holds while it lives: its directory, journal, engine, learner and audit, and the few moves between them."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from postrl.audit import Audit
from postrl.checkpoint import Checkpoints
from postrl.config import RlConfig, RunConfig
from postrl.contracts import Domain, SandboxFactory, Split, Task, Verifier
from postrl.learner.batch import RowShape, TrainBatch, empty_batch
from postrl.learner.losses import Loss
from postrl.learner.step import StepConfig, TrainState, policy_parts, train_step
from postrl.metrics import MetricsLog, open_wandb
from postrl.policy.base import Base
from postrl.policy.model import Params, adapter_specs
from postrl.policy.spec import initialize
from postrl.progress import Progress
from postrl.records import trajectory_path, write_trajectories
from postrl.rollout.engine import Engine, EngineStats, PolicySampler, tree_digest
from postrl.scheduler.collect import Collector
from postrl.scheduler.groups import Group, RecordedEpisode
from postrl.scheduler.journal import Journal


@dataclass(frozen=True)
class Parts:
    """What an experiment composes and hands over: the trainer knows no environment and no verifier by name."""

    base: Base
    domains: Mapping[str, Domain]
    verify: Verifier
    sandboxes: SandboxFactory


@dataclass
class Run:
    config: RunConfig
    parts: Parts
    run_dir: Path
    journal: Journal
    metrics: MetricsLog
    progress: Progress
    audit: Audit
    checkpoints: Checkpoints
    engine: Engine
    frozen: Params | None
    """The base, when an adapter is trained; None in full training."""
    phases_s: dict[str, float] = field(default_factory=dict)
    """Wall seconds of this process by phase; a resumed run adds to what is on disk."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the step under way: `rollout`, `compile`, `update`, `publish`."""
    num_steps_without_signal: int = 0
    _stats: EngineStats = field(default_factory=EngineStats)

    # ---------------------------------------------------------------------------------------- learner's state

    @property
    def adapter_scale(self) -> float:
        trainable = self.config.trainable
        return trainable.lora_alpha / trainable.lora_rank if trainable.lora_rank else 0.0

    def optimizer(self, learning_rate: optax.Schedule) -> optax.GradientTransformation:
        learner = self.config.learner
        return optax.chain(
            optax.clip_by_global_norm(learner.max_grad_norm),
            optax.adamw(learning_rate, weight_decay=learner.weight_decay),
        )

    @functools.cached_property
    def rl_optimizer(self) -> optax.GradientTransformation:
        return self.optimizer(rl_learning_rate(self.config.rl))

    def initial_trainable(self) -> Any:
        if self.frozen is None:
            return jax.tree.map(jnp.copy, self.parts.base.params)
        specs = adapter_specs(self.parts.base.model, self.config.trainable.lora_rank)
        return initialize(specs, jax.random.key(self.config.seed))

    def step_config(self, loss: Loss, optimizer: optax.GradientTransformation, *, temperature: float) -> StepConfig:
        return StepConfig(self.parts.base.model, self.adapter_scale, temperature, loss, optimizer)

    def compile_step(self, name: str, config: StepConfig, state: TrainState) -> Callable[..., tuple[TrainState, dict]]:
        """The step, compiled for every row shape before the loop begins; its memory report goes to `aot/`."""
        compiled, report = {}, {}
        shapes, max_rows = self.config.learner.row_shapes, self.config.learner.max_rows
        with self.timed("compilation"), self.progress.waiting(f"compilation of the {name} step"):
            for shape in shapes:
                start = time.perf_counter()
                batch = empty_batch(shape, max_rows)
                compiled[shape] = train_step.lower(config, state, self.frozen, batch).compile()
                memory = compiled[shape].memory_analysis()
                report[f"{shape.num_tokens}x{shape.num_targets}"] = {
                    "compile_s": time.perf_counter() - start,
                    "temporary_mb": memory.temp_size_in_bytes / 1e6,
                    "arguments_mb": memory.argument_size_in_bytes / 1e6,
                }
        (self.run_dir / "aot").mkdir(exist_ok=True)
        (self.run_dir / "aot" / f"{name}.json").write_text(json.dumps(report, indent=1))

        def step(state: TrainState, batch: TrainBatch | None) -> tuple[TrainState, dict[str, float]]:
            if batch is None:  # nothing to learn from: the policy stays, and the audit counts such steps
                return state, {}
            shape = RowShape(batch.rows.token_T.shape[1], batch.rows.target_N.shape[1])
            with self.measured("update"):
                state, metrics = compiled[shape](state, self.frozen, batch)
                return state, {name: float(value) for name, value in metrics.items()}

        return step

    # ---------------------------------------------------------------------------------------------- the engine

    def publish(self, trainable: Any, version: int) -> None:
        """Gives the policy to the engine, and proves that it arrived."""
        params, adapter = policy_parts(trainable, self.frozen)
        with self.measured("publish"):
            held, trained = self.engine.publish(params, adapter, version), tree_digest(trainable)
        self.audit.check(
            "sampler weights = learner weights",
            held == trained,
            f"The engine samples from version {version}, bit for bit what the learner trained."
            if held == trained
            else "The engine holds other weights than the learner trained: the publication lost or altered leaves.",
            step=version,
            digest=held[:16],
        )

    def collect(self, phase: str, step: int, groups: tuple[Group, ...], *, temperature: float) -> list[RecordedEpisode]:
        """Plays what the journal lacks with the published policy, and writes the step's Parquet file."""
        sampler = PolicySampler(self.engine, temperature, self.config.rollout.max_new_tokens)
        num_episodes = sum(len(group.episodes) for group in groups)
        with self.measured("rollout"), self.progress.waiting(f"{num_episodes} episodes of {phase}, step {step}"):
            ended = self.collector.collect(groups, lambda _: sampler)
        write_trajectories(trajectory_path(self.run_dir, phase, step), ended)
        return ended

    @functools.cached_property
    def collector(self) -> Collector:
        rollout = self.config.rollout
        return Collector(
            domains=self.parts.domains,
            sandboxes=self.parts.sandboxes,
            verify=self.parts.verify,
            chat=self.parts.base.chat,
            journal=self.journal,
            num_workers=rollout.engine.max_requests,
            max_context=rollout.engine.max_context,
            max_attempts=rollout.max_attempts,
            max_turns=rollout.max_turns,
        )

    def tasks(self, split: Split, spans: Mapping[str, tuple[int, int]]) -> list[Task]:
        """Of each domain in `spans` the tasks first..first+num-1; the domains in turn, so that none comes last."""
        seed = self.config.seed
        of_domain = [
            [self.parts.domains[name].generate(split, seed, first + i) for i in range(num)]
            for name, (first, num) in sorted(spans.items())  # by name: the order of a config's dict decides nothing
        ]
        return [task for turn in itertools.zip_longest(*of_domain) for task in turn if task is not None]

    def demonstration_tasks(self) -> list[Task]:
        return self.tasks("train", {name: (0, d.num_demonstrations) for name, d in self.config.domains.items()})

    def rl_tasks(self, step: int, num_steps: int = 1) -> list[Task]:
        """The next tasks of every domain, after those that the cold start demonstrated."""
        return self.tasks(
            "train",
            {
                name: (d.num_demonstrations + step * d.groups_per_step, num_steps * d.groups_per_step)
                for name, d in self.config.domains.items()
            },
        )

    def heldout_tasks(self) -> list[Task]:
        return self.tasks("heldout", {name: (0, d.num_heldout) for name, d in self.config.domains.items()})

    def engine_metrics(self) -> dict[str, float]:
        """What the engine did, and where the seconds went, since the last call."""
        before, now = self._stats, self.engine.stats
        seconds, self._stats, self.seconds = self.seconds, now, {}
        busy_s = now.busy_s - before.busy_s
        num_prompt = now.num_prompt_tokens - before.num_prompt_tokens
        return {
            **{f"seconds.{name}": value for name, value in seconds.items()},
            "engine.idle_s": now.idle_s - before.idle_s,
            "tokens_per_s": (now.num_sampled_tokens - before.num_sampled_tokens)
            / max(seconds.get("rollout", 0.0), 1e-9),
            "engine.rows": (now.num_sampled_tokens - before.num_sampled_tokens)
            / max(1, now.num_steps - before.num_steps),
            "engine.busy_s": busy_s,
            "engine.prefix_hit": 1 - (now.num_prefilled_tokens - before.num_prefilled_tokens) / max(1, num_prompt),
        }

    @contextmanager
    def measured(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + time.perf_counter() - start
            partial = self.run_dir / ".phases.json.partial"
            partial.write_text(json.dumps(self.phases_s))
            partial.replace(self.run_dir / "phases.json")


def rl_learning_rate(rl: RlConfig) -> optax.Schedule:
    """Rises over the first steps, falls over the last; the very last still moves the policy."""
    peak = rl.learning_rate
    rise = optax.linear_schedule(peak / max(1, rl.num_warmup_steps), peak, rl.num_warmup_steps)
    if rl.num_decay_steps == 0:
        return rise
    fall = optax.linear_schedule(peak, 0.0, rl.num_decay_steps + 1)
    return optax.join_schedules([rise, fall], [rl.num_steps - rl.num_decay_steps - 1])


@contextmanager
def open_run(config: RunConfig, parts: Parts) -> Iterator[Run]:
    """Opens the run directory (new, or left by an interrupted run of the same config) and starts the engine."""
    run_dir = config.run_dir
    run_dir.mkdir(parents=True, exist_ok=True)
    _check_same_config(run_dir / "config.json", config, parts)
    phases = run_dir / "phases.json"
    with Journal.open(run_dir / "journal.db") as journal, Progress(config.name) as progress:
        mirror = open_wandb(
            run_dir, project=config.wandb_project, name=config.name, config=config.to_json(), say=progress.say
        )
        trains_adapter = config.trainable.lora_rank > 0
        engine = Engine(
            parts.base.model,
            parts.base.params,
            None,
            config.trainable.lora_alpha / config.trainable.lora_rank if trains_adapter else 0.0,
            parts.base.chat.eos_id,
            config.rollout.engine,
        )
        checkpoints = Checkpoints(run_dir / "checkpoints")
        try:
            yield Run(
                config=config,
                parts=parts,
                run_dir=run_dir,
                journal=journal,
                metrics=MetricsLog(run_dir / "metrics.jsonl", mirror),
                progress=progress,
                audit=Audit(run_dir / "audit.json"),
                checkpoints=checkpoints,
                engine=engine,
                frozen=parts.base.params if trains_adapter else None,
                phases_s=json.loads(phases.read_text()) if phases.exists() else {},
            )
        finally:
            engine.close()
            checkpoints.close()
            if mirror is not None:
                mirror.close()


def _check_same_config(path: Path, config: RunConfig, parts: Parts) -> None:
    unknown = sorted(config.domains.keys() - parts.domains.keys())
    if unknown:
        raise ValueError(f"config.domains names {unknown}; the experiment brings {sorted(parts.domains)}")
    if path.exists():
        before = json.loads(path.read_text())["fingerprint"]
        if before != config.fingerprint:
            raise ValueError(
                f"{path.parent} belongs to a run with another config (fingerprint {before}, now {config.fingerprint}); "
                f"give the new run another name, or delete {path.parent} to start over"
            )
        return
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "gymnasium", "numpy", "wandb")
    record = {
        "fingerprint": config.fingerprint,
        "git_commit": _git_commit(),
        "base": {"name": parts.base.name},
        "domains": sorted(parts.domains),
        "packages": {name: package_version(name) for name in packages},
        "config": config.to_json(),
    }
    partial = path.with_name(".config.json.partial")
    partial.write_text(json.dumps(record, indent=1))
    partial.replace(path)


def _git_commit() -> str | None:
    """The checkout's commit, or None where postrl does not run from one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
