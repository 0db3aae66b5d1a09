"""The training loop: evaluate the base, a cold start, reinforcement learning, evaluate again. `train` fits one screen.

A run is its directory (README, "A run directory"). Started again after any interruption with the same config it goes on
where it was: what the journal holds is not played again, and the learner's state comes from the last checkpoint that the
journal names. In this synchronous mode the result on CPU is bit for bit that of an uninterrupted run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from postrl.cold_start import cold_start
from postrl.config import RunConfig
from postrl.evaluate import evaluate
from postrl.learner.group_batch import EndedEpisode, StepData, step_data
from postrl.learner.step import TrainState, init_state
from postrl.preflight import preflight
from postrl.run_state import Parts, Run, open_run
from postrl.scheduler.collect import by_group
from postrl.scheduler.groups import Group, RecordedEpisode
from postrl.step_audit import audit_step
from postrl.summary import finish


def train(config: RunConfig, parts: Parts) -> Path:
    """Runs, or resumes, `config` to its end; returns the run directory.

    Raises ValueError for a config that contradicts the directory, and `postrl.audit.AuditFailure` when an invariant breaks.
    """
    with open_run(config, parts) as run:
        run.publish(run.initial_trainable(), version=0)
        preflight(run)
        evaluate(run, "base")
        run.publish(trained := cold_start(run), version=1)
        evaluate(run, "cold_start")
        state, first_step = resume(run, trained)
        step_config = run.step_config(config.rl.loss, run.rl_optimizer, temperature=config.rl.temperature)
        step_of = run.compile_step("rl", step_config, state)
        run.engine_metrics()  # forget what came before: the first step's figures are its own
        run.progress.phase("reinforcement learning", total=config.rl.num_steps, done=first_step)
        for step in range(first_step, config.rl.num_steps):
            with run.timed("rl"):
                groups = draw(run, step)
                ended = run.collect("rl", step, groups, temperature=config.rl.temperature)
                data = learner_data(run, groups, ended)
                state, metrics = step_of(state, data.batch)
                run.publish(state.trainable, version=step + 2)
                audit_step(run, step, data, metrics)
                commit(run, step, state, {**data.metrics, **metrics})
        evaluate(run, "rl")
        return finish(run)


def resume(run: Run, trained: Any) -> tuple[TrainState, int]:
    """The learner's state and the next step: after the cold start, or from the last checkpoint that the journal names."""
    state = init_state(trained, run.rl_optimizer)
    committed = run.journal.last_committed("rl", with_checkpoint=True)
    first_step = 0
    if committed is not None and committed.checkpoint is not None:
        state, first_step = run.checkpoints.restore(committed.checkpoint, like=state), committed.step + 1
        run.publish(state.trainable, version=first_step + 1)
    run.metrics.rewind("rl", first_step - 1)
    return state, first_step


def draw(run: Run, step: int) -> tuple[Group, ...]:
    """The step's groups, on record in the journal before the first of their episodes is played."""
    config = run.config
    return run.journal.draw("rl", step, run.rl_tasks(step), group_size=config.rl.group_size, run_seed=config.seed)


def learner_data(run: Run, groups: tuple[Group, ...], ended: list[RecordedEpisode]) -> StepData:
    """The step's batch, from what the episodes of each group came to."""
    config = run.config
    return step_data(
        [
            [EndedEpisode(e.episode.task.domain, e.outcome, e.trajectory) for e in members]
            for members in by_group(groups, ended)
        ],
        normalize_std=config.rl.normalize_std,
        shapes=config.learner.row_shapes,
        max_rows=config.learner.max_rows,
    )


def commit(run: Run, step: int, state: TrainState, metrics: dict[str, float]) -> None:
    """Writes the checkpoint when one is due, declares the step done, and reports it."""
    config = run.config
    last = step + 1 == config.rl.num_steps
    due = last or (step + 1) % config.checkpoint_every == 0
    name = run.checkpoints.save(step + 1, state) if due else None
    metrics = metrics | run.engine_metrics()
    run.metrics.log("rl", step, metrics)  # before the step counts as done: a kill between the two would lose the line
    run.journal.commit_step("rl", step, checkpoint=name)
    for domain in config.domains:
        run.progress.domain(domain, metrics.get(f"success.{domain}", 0.0))
    run.progress.update(
        step + 1,
        reward=metrics["reward.mean"],
        tokens_per_s=metrics["tokens_per_s"],
        faults=int(metrics["faults"]),
        rollout_s=metrics["seconds.rollout"],
        update_s=metrics.get("seconds.update", 0.0),
    )
