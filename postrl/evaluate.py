"""Evaluation: held-out tasks, each played once, greedily, by the same episode function that trains."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from postrl.codec import outcome_name
from postrl.contracts import Scored
from postrl.run_state import Run
from postrl.scheduler.groups import RecordedEpisode


@dataclass(frozen=True)
class Evaluation:
    """How one policy did. `success` maps a task's id to whether it was solved; tasks that a fault of ours hit are absent."""

    name: str
    success: dict[str, bool]


def evaluate(run: Run, name: str) -> Evaluation:
    """Plays the held-out tasks with the published policy (what a resumed run already played is taken from its journal)."""
    phase = f"evaluate:{name}"
    with run.timed(phase):
        tasks = run.heldout_tasks()
        run.progress.phase(f"evaluation of {name}", total=len(tasks))
        groups = run.journal.draw(phase, 0, tasks, group_size=1, run_seed=run.config.seed)
        ended = run.collect(phase, 0, groups, temperature=0.0)
    if run.journal.last_committed(phase) is None:
        run.metrics.rewind(phase, None)
        run.metrics.log(phase, 0, success_metrics(ended))
        run.journal.commit_step(phase, 0)
    return Evaluation(
        name, {e.episode.task.id: e.outcome.verdict.success for e in ended if isinstance(e.outcome, Scored)}
    )


def success_metrics(ended: list[RecordedEpisode]) -> dict[str, float]:
    """`success.<domain>`, `success.mean` and `faults`."""
    of_domain: dict[str, list[bool]] = defaultdict(list)
    for e in ended:
        if isinstance(e.outcome, Scored):
            of_domain[e.episode.task.domain].append(e.outcome.verdict.success)
    scored = [s for values in of_domain.values() for s in values]
    return {
        **{f"success.{domain}": sum(v) / len(v) for domain, v in of_domain.items()},
        "success.mean": sum(scored) / max(1, len(scored)),
        "faults": sum(outcome_name(e.outcome) == "infra_fault" for e in ended),
    }
