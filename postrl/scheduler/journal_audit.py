"""What a journal proves about a run: every prompt drawn was counted once, and how its episodes ended.

The proof is recounted from the rows, not taken from the constraints that should guarantee it: a journal that was
tampered with, or written by a faulty version, shows. By hand: `sqlite3 journal.db "select * from prompts"`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROMPTS_VIEW = """
CREATE VIEW prompts AS
SELECT g.phase, g.step, g.group_index, g.task_id, g.domain, g.kind, g.split, g.seed, g.task_index, g.content_digest,
       g.group_size,
       (SELECT COUNT(*) FROM episodes e WHERE e.group_id = g.id) AS num_episodes,
       (SELECT COUNT(*) FROM episodes e JOIN outcomes o ON o.episode_id = e.id WHERE e.group_id = g.id) AS num_outcomes,
       (SELECT COUNT(*) FROM counted c WHERE c.group_id = g.id) AS num_counted,
       (SELECT MIN(c.step) FROM counted c WHERE c.group_id = g.id) AS counted_step
FROM groups g
"""


@dataclass(frozen=True)
class PhaseCounts:
    """The prompts of one phase and what became of them."""

    phase: str
    last_step: int | None
    """Last committed step; None: none yet."""
    num_committed_steps: int
    missing_steps: tuple[int, ...]
    """Steps between the first and the last committed one that were never committed."""
    num_prompts: int
    """Groups drawn; one group is one task with `group_size` episodes."""
    num_counted: int
    """Groups that a committed step counted."""
    num_counted_twice: int
    num_lost: int
    """Groups drawn for a step up to `last_step` that no committed step counted."""
    num_incomplete: int
    """Counted groups in which an episode, or an episode's outcome, is missing."""
    num_repeated: int
    """Draws beyond the first of the same (domain, split, seed, index)."""
    num_repeated_content: int
    """Draws beyond the first of a prompt with the same words and files, whatever its index."""
    num_episodes: int
    num_open: int
    """Episodes without an outcome: the steps in progress."""
    outcomes: Mapping[str, Mapping[str, int]]
    """Domain -> kind of outcome -> number of episodes."""
    faults: Mapping[str, Mapping[str, int]]
    """Domain -> stage -> number of faulted attempts, those that a later attempt made good included."""

    @property
    def num_faults(self) -> int:
        return sum(sum(stages.values()) for stages in self.faults.values())

    def problems(self) -> tuple[str, ...]:
        """Why "each prompt counted once" doesn't hold, in plain sentences; empty when it does.

        Repeated tasks and skipped steps are problems in training only: an evaluation plays the same held-out tasks, at
        whichever steps it is asked for.
        """
        training = not self.phase.startswith("evaluate:")
        found = []
        if self.num_counted_twice:
            found.append(f"{self.phase}: {self.num_counted_twice} prompts were counted more than once")
        if self.num_lost:
            found.append(f"{self.phase}: {self.num_lost} prompts drawn up to step {self.last_step} were never counted")
        if self.num_incomplete:
            found.append(f"{self.phase}: {self.num_incomplete} counted prompts lack an episode or its outcome")
        if training and self.missing_steps:
            found.append(
                f"{self.phase}: steps {list(self.missing_steps)} were never committed though step {self.last_step} was"
            )
        if training and self.num_repeated:
            found.append(f"{self.phase}: {self.num_repeated} prompts were drawn again under another step or group")
        return tuple(found)


@dataclass(frozen=True)
class AuditCounts:
    """Everything that the audit needs to know from the journal, by phase."""

    phases: Mapping[str, PhaseCounts]

    @property
    def num_faults(self) -> int:
        return sum(phase.num_faults for phase in self.phases.values())

    def problems(self) -> tuple[str, ...]:
        """All phases' problems; empty: each prompt was counted exactly once."""
        return tuple(problem for phase in self.phases.values() for problem in phase.problems())


def _nested(rows: list[Any]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for domain, name, number in rows:
        table.setdefault(domain, {})[name] = number
    return table


def _phase_counts(connection: sqlite3.Connection, phase: str) -> PhaseCounts:
    def one(query: str) -> Any:
        return connection.execute(query, {"phase": phase}).fetchone()

    def all_rows(query: str) -> list[Any]:
        return connection.execute(query, {"phase": phase}).fetchall()

    committed = [step for (step,) in all_rows("SELECT step FROM steps WHERE phase = :phase ORDER BY step")]
    last_step = committed[-1] if committed else None
    present = set(committed)
    num_prompts, num_counted, num_twice, num_lost, num_incomplete, num_tasks, num_contents = one("""
        SELECT COUNT(*),
               COALESCE(SUM(num_counted > 0), 0),
               COALESCE(SUM(num_counted > 1), 0),
               COALESCE(SUM(num_counted = 0 AND step <= (SELECT MAX(step) FROM steps WHERE phase = :phase)), 0),
               COALESCE(SUM(num_counted > 0 AND (num_episodes <> group_size OR num_outcomes <> group_size)), 0),
               COUNT(DISTINCT domain || '/' || split || '/' || seed || '/' || task_index),
               COUNT(DISTINCT content_digest)
        FROM prompts WHERE phase = :phase""")
    num_episodes, num_open = one("""
        SELECT COUNT(*), COALESCE(SUM(o.episode_id IS NULL), 0)
        FROM groups g JOIN episodes e ON e.group_id = g.id LEFT JOIN outcomes o ON o.episode_id = e.id
        WHERE g.phase = :phase""")
    outcomes = all_rows("""
        SELECT g.domain, o.kind, COUNT(*)
        FROM groups g JOIN episodes e ON e.group_id = g.id JOIN outcomes o ON o.episode_id = e.id
        WHERE g.phase = :phase GROUP BY 1, 2 ORDER BY 1, 2""")
    faults = all_rows("""
        SELECT g.domain, f.stage, COUNT(*)
        FROM groups g JOIN episodes e ON e.group_id = g.id JOIN faults f ON f.episode_id = e.id
        WHERE g.phase = :phase GROUP BY 1, 2 ORDER BY 1, 2""")
    return PhaseCounts(
        phase=phase,
        last_step=last_step,
        num_committed_steps=len(committed),
        missing_steps=tuple(step for step in range(committed[0], committed[-1]) if step not in present)
        if committed
        else (),
        num_prompts=num_prompts,
        num_counted=num_counted,
        num_counted_twice=num_twice,
        num_lost=num_lost,
        num_incomplete=num_incomplete,
        num_repeated=num_prompts - num_tasks,
        num_repeated_content=num_prompts - num_contents,
        num_episodes=num_episodes,
        num_open=num_open,
        outcomes=_nested(outcomes),
        faults=_nested(faults),
    )


def audit_counts(connection: sqlite3.Connection) -> AuditCounts:
    """Recounts the journal behind `connection`."""
    phases = [
        phase
        for (phase,) in connection.execute(
            "SELECT phase FROM groups UNION SELECT phase FROM steps ORDER BY phase"
        ).fetchall()
    ]
    return AuditCounts({phase: _phase_counts(connection, phase) for phase in phases})
