"""The cold start: a short supervised phase on the generators' reference trajectories, played in the real environments.

Without a first success there is no signal: a base that never solves a task gets the same reward in every episode of its
group. Demonstrations are trajectories like any other, judged like any other, and read back from Parquet through Grain.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import optax

from postrl.contracts import Scored, Task
from postrl.learner.batch import Episode, TrainBatch, pack
from postrl.learner.losses import Supervised
from postrl.learner.step import init_state
from postrl.records import TrajectorySource, trajectory_path, write_trajectories
from postrl.rollout.episode import ReferenceSampler
from postrl.run_state import Run

PHASE = "cold_start"


def cold_start(run: Run) -> Any:
    """The trainable after the cold start: trained now, or restored from its checkpoint."""
    config = run.config.cold_start
    trainable = run.initial_trainable()
    path = demonstrate(run)
    source = TrajectorySource(path)
    num_steps = len(source) * config.num_epochs // config.batch_size
    peak, num_warmup_steps = config.learning_rate, max(1, num_steps // 10)
    # At least 2: the schedule must be longer than its warm-up.
    optimizer = run.optimizer(
        optax.warmup_cosine_decay_schedule(peak / num_warmup_steps, peak, num_warmup_steps, max(num_steps, 2))
    )
    state = init_state(trainable, optimizer)
    committed = run.journal.last_committed(PHASE)
    if committed is not None:
        assert committed.checkpoint is not None, "a committed cold start has a checkpoint"
        return run.checkpoints.restore(committed.checkpoint, like=state).trainable
    run.metrics.rewind(PHASE, None)
    step_of = run.compile_step(PHASE, run.step_config(Supervised(), optimizer, temperature=1.0), state)
    with run.timed(PHASE):
        run.progress.phase("cold start", total=num_steps)
        for step, batch in enumerate(batches(source, run, num_steps)):
            state, metrics = step_of(state, batch)
            run.metrics.log(PHASE, step, {name: metrics[name] for name in ("loss", "grad_norm", "update_norm")})
            run.progress.update(step + 1, loss=metrics["loss"])
        name = run.checkpoints.save(0, state)
        run.journal.commit_step(PHASE, 0, checkpoint=name)
    return state.trainable


def demonstrate(run: Run) -> Any:
    """Plays the references of the first training tasks; returns the Parquet file of the trajectories.

    The audit stops the run when a reference does not score 1: then the task, the sandbox or the verifier is broken.
    """
    tasks = run.demonstration_tasks()
    groups = run.journal.draw(PHASE, 0, tasks, group_size=1, run_seed=run.config.seed)
    path = trajectory_path(run.run_dir, PHASE, 0)
    run.progress.phase("demonstrations", total=len(tasks))
    with run.timed(PHASE), run.progress.waiting(f"{len(tasks)} demonstrations"):
        ended = run.collector.collect(groups, lambda task: reference_sampler(run, task))
        write_trajectories(path, ended)
    failed = [e for e in ended if not (isinstance(e.outcome, Scored) and e.outcome.verdict.success)]
    run.audit.check(
        "demonstrations score 1",
        not failed,
        f"All {len(ended)} reference trajectories were played in the sandbox and scored 1."
        if not failed
        else f"{len(failed)} of {len(ended)} reference trajectories did not score 1, {failed[0].episode.task.id} first: "
        "its generator, the sandbox's tools or its verifier is at fault.",
        failed=[(e.episode.task.id, repr(e.outcome)) for e in failed[:5]],
    )
    return path


def reference_sampler(run: Run, task: Task) -> ReferenceSampler:
    return ReferenceSampler(run.parts.base.chat, task.reference)


def batches(source: TrajectorySource, run: Run, num_steps: int) -> Iterator[TrainBatch]:
    """`num_steps` packed batches, shuffled by the run's seed."""
    config, learner = run.config.cold_start, run.config.learner
    dataset = (
        grain.MapDataset.source(source)
        .seed(run.config.seed)
        .shuffle()
        .repeat(config.num_epochs)
        .batch(config.batch_size, drop_remainder=True, batch_fn=list)
    )
    for step in range(num_steps):
        groups: dict[str, list[Episode]] = defaultdict(list)
        rows: Any = dataset[step]
        for row in rows:
            # The demonstrations of a domain share its system message: one group, whose beginning is computed once.
            groups[row["domain"]].append(demonstration(row["token_T"], row["is_policy_T"]))
        yield pack(list(groups.values()), learner.row_shapes, learner.max_rows)


def demonstration(token_T: np.ndarray, is_policy_T: np.ndarray) -> Episode:
    return Episode(token_T, is_policy_T, np.zeros(len(token_T), np.float32), advantage=1.0)
