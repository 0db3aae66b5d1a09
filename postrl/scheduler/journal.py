"""The journal: what a run drew, how each episode ended, which steps are done; so that a killed run resumes exactly.

One SQLite file in WAL mode. A run asks for the groups of a step with `draw` (the first time they are recorded,
afterwards the recorded ones come back), skips the episodes that `recorded` returns, records the others as they finish,
and commits the step once its update is on disk. Killed anywhere, the same program does only what is missing.

Durability: `synchronous=FULL`, one fsync for each write. NORMAL would survive `kill -9` but lose the last commits at a
power cut, and the run would then resume from a checkpoint that its journal doesn't know. Measured: 3.8 ms a record
against 0.2 ms; an episode takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from postrl.codec import decode_outcome, decode_trajectory, encode_outcome, encode_trajectory, outcome_name
from postrl.contracts import Outcome, Scored, Task, Trajectory, outcome_reward
from postrl.scheduler.groups import Episode, EpisodeKey, Group, RecordedEpisode, make_group
from postrl.scheduler.journal_audit import AuditCounts, audit_counts
from postrl.scheduler.journal_file import open_for_reading, open_for_writing

_PHASE = re.compile(r"(cold_start|rl|evaluate:[A-Za-z0-9_.-]+)")


class JournalMismatch(ValueError):
    """What the run asks for contradicts what the journal recorded."""


@dataclass(frozen=True)
class CommittedStep:
    """A step whose update is on disk."""

    phase: str
    step: int
    checkpoint: str | None
    """Name of the checkpoint that holds its result; None: the step made none."""
    info: Mapping[str, Any]


class Journal:
    """The journal of one run. All methods may be called from any thread; one process writes at a time."""

    def __init__(self, connection: sqlite3.Connection, lock: int | None):
        self._connection = connection
        self._lock = lock
        self._mutex = threading.RLock()

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, read_only: bool = False) -> Journal:
        """Opens the journal at `path`, which `read_only=False` makes when it isn't there.

        `read_only=True` may look on while a run writes. Raises ValueError when another process writes to it, or when
        the file was written by another version; FileNotFoundError when there is nothing to read.
        """
        return cls(*(open_for_reading(Path(path)) if read_only else open_for_writing(Path(path))))

    def close(self) -> None:
        """Ends the connection and frees the file for another process. May be called twice."""
        with self._mutex:
            self._connection.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._mutex:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back by itself on some errors, a full disk among them.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._mutex:
            return self._connection.execute(query, values).fetchall()

    # ------------------------------------------------------------------------------------------------- drawing

    def draw(
        self, phase: str, step: int, tasks: Sequence[Task], *, group_size: int, run_seed: int
    ) -> tuple[Group, ...]:
        """The groups of one step, one a task, `group_size` episodes each; recorded at the first call.

        Asked again with the same arguments it returns the same. Raises `JournalMismatch` when the step was recorded
        with other tasks, sizes or seeds: then the config or a generator changed since the run began.
        """
        if not _PHASE.fullmatch(phase):
            raise ValueError(f"phase {phase!r}: expected cold_start, rl or evaluate:<name>")
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; a group has at least one episode")
        groups = tuple(make_group(phase, step, index, task, group_size, run_seed) for index, task in enumerate(tasks))
        wanted = [_group_row(group) for group in groups]
        with self._transaction() as connection:
            recorded = connection.execute(
                "SELECT phase, step, group_index, domain, kind, split, seed, task_index, task_id, content_digest,"
                " group_size FROM groups WHERE phase = ? AND step = ? ORDER BY group_index",
                (phase, step),
            ).fetchall()
            if recorded:
                _check_same_draw(connection, recorded, wanted, groups)
                return groups
            for group, row in zip(groups, wanted, strict=True):
                group_id = connection.execute(
                    "INSERT INTO groups (phase, step, group_index, domain, kind, split, seed, task_index, task_id,"
                    " content_digest, group_size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    row,
                ).lastrowid
                connection.executemany(
                    "INSERT INTO episodes (group_id, member, episode_seed) VALUES (?, ?, ?)",
                    [(group_id, episode.key.member, episode.seed) for episode in group.episodes],
                )
        return groups

    def _episode_id(self, key: EpisodeKey) -> tuple[int, int, str]:
        rows = self._rows(
            "SELECT e.id, e.episode_seed, g.task_id FROM episodes e JOIN groups g ON g.id = e.group_id"
            " WHERE g.phase = ? AND g.step = ? AND g.group_index = ? AND e.member = ?",
            key.phase,
            key.step,
            key.group,
            key.member,
        )
        if not rows:
            raise JournalMismatch(f"episode {key} was never drawn; draw its step before recording it")
        return rows[0]

    # ---------------------------------------------------------------------------------------- outcomes and faults

    def record(
        self, episode: Episode, outcome: Outcome, trajectory: Trajectory | None, *, attempt: int = 0
    ) -> RecordedEpisode:
        """Records how `episode` ended, once and for all; on return it is on disk.

        Recording the same again does nothing. Raises `JournalMismatch` when another ending is on record, when the
        episode was never drawn, or when the trajectory is another's; ValueError on data that can't be encoded.
        """
        key = episode.key
        if trajectory is not None and (trajectory.task.id, trajectory.episode_seed) != (episode.task.id, episode.seed):
            raise JournalMismatch(
                f"episode {key} is task {episode.task.id} with seed {episode.seed}; the trajectory is of task "
                f"{trajectory.task.id} with seed {trajectory.episode_seed}"
            )
        encoded = encode_outcome(outcome)
        payload = None if trajectory is None else encode_trajectory(trajectory)
        digest = hashlib.sha256(encoded.encode() + b"\0" + (payload or b"")).hexdigest()
        success = isinstance(outcome, Scored) and outcome.verdict.success
        with self._transaction() as connection:
            episode_id, seed, task_id = self._episode_id(key)
            if (seed, task_id) != (episode.seed, episode.task.id):
                raise JournalMismatch(
                    f"episode {key} was drawn as task {task_id} with seed {seed}, not as {episode.task.id} with seed "
                    f"{episode.seed}"
                )
            existing = connection.execute(
                "SELECT digest, attempt, outcome FROM outcomes WHERE episode_id = ?", (episode_id,)
            ).fetchone()
            if existing is None:
                connection.execute(
                    "INSERT INTO outcomes VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        episode_id,
                        attempt,
                        outcome_name(outcome),
                        outcome_reward(outcome),
                        int(success),
                        encoded,
                        payload,
                        digest,
                    ),
                )
            elif existing[:2] != (digest, attempt):
                raise JournalMismatch(
                    f"episode {key} already ended in attempt {existing[1]} with {existing[2]}; attempt {attempt} "
                    f"brings {encoded}" + ("" if existing[2] != encoded else " (another trajectory)")
                )
        return RecordedEpisode(episode, attempt, outcome, trajectory)

    def outcome(self, episode: Episode) -> RecordedEpisode | None:
        """How `episode` ended, or None while it hasn't."""
        group = Group(episode.key.phase, episode.key.step, episode.key.group, episode.task, (episode,))
        return self.recorded([group]).get(episode.key)

    def recorded(self, groups: Sequence[Group]) -> dict[EpisodeKey, RecordedEpisode]:
        """The episodes of `groups` that have ended; what is missing from it is still to be played."""
        found = {}
        for group in groups:
            episodes = {episode.key.member: episode for episode in group.episodes}
            rows = self._rows(
                "SELECT e.member, o.attempt, o.outcome, o.trajectory FROM groups g"
                " JOIN episodes e ON e.group_id = g.id JOIN outcomes o ON o.episode_id = e.id"
                " WHERE g.phase = ? AND g.step = ? AND g.group_index = ? ORDER BY e.member",
                group.phase,
                group.step,
                group.index,
            )
            for member, attempt, outcome, payload in rows:
                if (episode := episodes.get(member)) is not None:
                    trajectory = None if payload is None else decode_trajectory(payload, episode.task)
                    found[episode.key] = RecordedEpisode(episode, attempt, decode_outcome(outcome), trajectory)
        return found

    def record_fault(self, key: EpisodeKey, attempt: int, stage: str, message: str) -> None:
        """Records that an attempt of an episode failed through no fault of the policy's.

        Recording the same again does nothing; another fault under the same attempt raises `JournalMismatch`.
        """
        # Messages may quote bytes that a policy wrote; SQLite takes no lone surrogates.
        row = tuple(text.encode("utf-8", "backslashreplace").decode() for text in (stage, message))
        with self._transaction() as connection:
            episode_id, _, _ = self._episode_id(key)
            existing = connection.execute(
                "SELECT stage, message FROM faults WHERE episode_id = ? AND attempt = ?", (episode_id, attempt)
            ).fetchone()
            if existing is None:
                connection.execute("INSERT INTO faults VALUES (?, ?, ?, ?)", (episode_id, attempt, *row))
            elif existing != row:
                raise JournalMismatch(
                    f"attempt {attempt} of episode {key} already failed in {existing[0]}: {existing[1]}; now in "
                    f"{row[0]}: {row[1]}"
                )

    def num_faults(self, key: EpisodeKey) -> int:
        """Failed attempts on record, and so the number of the next attempt. A kill in mid-attempt uses up none."""
        episode_id, _, _ = self._episode_id(key)
        return self._rows("SELECT COUNT(*) FROM faults WHERE episode_id = ?", episode_id)[0][0]

    # --------------------------------------------------------------------------------------------------- steps

    def commit_step(
        self,
        phase: str,
        step: int,
        *,
        checkpoint: str | None = None,
        info: Mapping[str, Any] | None = None,
        groups: Sequence[Group] | None = None,
    ) -> None:
        """Declares a step done: its update (and `checkpoint`, if named) is on disk, and its prompts are counted.

        `groups` are those that the update learned from; by default all that were drawn for the step. A step that is
        repeated after a resume from an earlier checkpoint may be committed again with the same groups; its checkpoint
        and info are then replaced. Raises `JournalMismatch` when a group lacks an outcome or was counted before.
        """
        with self._transaction() as connection:
            if groups is None:
                keys = [(phase, step, index) for (index,) in self._rows(
                    "SELECT group_index FROM groups WHERE phase = ? AND step = ?", phase, step)]  # fmt: skip
            else:
                keys = [(group.phase, group.step, group.index) for group in groups]
            group_ids = set()
            for key in keys:
                row = connection.execute(
                    "SELECT g.id, p.group_size, p.num_outcomes, c.phase, c.step FROM groups g"
                    " JOIN prompts p USING (phase, step, group_index) LEFT JOIN counted c ON c.group_id = g.id"
                    " WHERE g.phase = ? AND g.step = ? AND g.group_index = ?",
                    key,
                ).fetchone()
                if row is None:
                    raise JournalMismatch(f"group {key} was never drawn; step {step} of {phase} can't count it")
                group_id, group_size, num_outcomes, counted_phase, counted_step = row
                if num_outcomes != group_size:
                    raise JournalMismatch(
                        f"group {key} has {num_outcomes} outcomes of {group_size}; record the others before committing "
                        f"step {step} of {phase}"
                    )
                if counted_phase is not None and (counted_phase, counted_step) != (phase, step):
                    raise JournalMismatch(f"group {key} was already counted in step {counted_step} of {counted_phase}")
                group_ids.add(group_id)
            before = {group_id for (group_id,) in self._rows(
                "SELECT group_id FROM counted WHERE phase = ? AND step = ?", phase, step)}  # fmt: skip
            known = self._rows("SELECT 1 FROM steps WHERE phase = ? AND step = ?", phase, step)
            if known and before != group_ids:
                raise JournalMismatch(
                    f"step {step} of {phase} was committed with {len(before)} groups and is now with {len(group_ids)} "
                    "others; a step counts the same prompts however often it is repeated"
                )
            connection.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?)"
                " ON CONFLICT (phase, step) DO UPDATE SET checkpoint = excluded.checkpoint, info = excluded.info",
                (phase, step, checkpoint, json.dumps(dict(info or {}), allow_nan=False, sort_keys=True)),
            )
            connection.executemany(
                "INSERT INTO counted VALUES (?, ?, ?)",
                [(group_id, phase, step) for group_id in sorted(group_ids - before)],
            )

    def last_committed(self, phase: str, *, with_checkpoint: bool = False) -> CommittedStep | None:
        """The latest committed step of `phase`, or None; `with_checkpoint`: the latest that named a checkpoint."""
        rows = self._rows(
            "SELECT step, checkpoint, info FROM steps WHERE phase = ? AND (checkpoint IS NOT NULL OR NOT ?)"
            " ORDER BY step DESC LIMIT 1",
            phase,
            with_checkpoint,
        )
        return CommittedStep(phase, rows[0][0], rows[0][1], json.loads(rows[0][2])) if rows else None

    def forget_trajectories(self, phase: str, step: int) -> int:
        """Drops the trajectories of a step from the journal, outcomes stay; returns how many.

        For long runs, once the step's Parquet file is written. Raises ValueError unless a checkpoint of this or a later
        step is committed: until then a resume would need them.
        """
        last = self.last_committed(phase, with_checkpoint=True)
        if last is None or last.step < step:
            raise ValueError(
                f"step {step} of {phase} may still be repeated: the last checkpoint on record is "
                f"{'none' if last is None else f'of step {last.step}'}"
            )
        with self._transaction() as connection:
            return connection.execute(
                "UPDATE outcomes SET trajectory = NULL WHERE trajectory IS NOT NULL AND episode_id IN (SELECT e.id"
                " FROM episodes e JOIN groups g ON g.id = e.group_id WHERE g.phase = ? AND g.step = ?)",
                (phase, step),
            ).rowcount

    def audit_counts(self) -> AuditCounts:
        """What the audit needs: prompts drawn and counted, outcomes and faults; recounted from the rows."""
        with self._mutex:
            return audit_counts(self._connection)


# ----------------------------------------------------------------------------------------------------- helpers


def _group_row(group: Group) -> tuple[Any, ...]:
    task = group.task
    return (
        group.phase,
        group.step,
        group.index,
        task.domain,
        task.kind,
        task.split,
        task.seed,
        task.index,
        task.id,
        task.content_digest,
        len(group.episodes),
    )


def _check_same_draw(
    connection: sqlite3.Connection, recorded: list[Any], wanted: list[tuple[Any, ...]], groups: Sequence[Group]
) -> None:
    fix = "the config or a generator changed since this run began: restore it, or choose another run directory"
    phase, step = recorded[0][:2]
    if len(recorded) != len(wanted):
        raise JournalMismatch(
            f"step {step} of {phase} was drawn with {len(recorded)} tasks and is now asked for with {len(wanted)}; "
            f"{fix}"
        )
    for before, now in zip(recorded, wanted, strict=True):
        if before != now:
            raise JournalMismatch(
                f"group {before[2]} of step {step} of {phase} was drawn as {before[8]} (content {before[9][:12]}, "
                f"{before[10]} episodes) and is now {now[8]} (content {now[9][:12]}, {now[10]} episodes); {fix}"
            )
    seeds = connection.execute(
        "SELECT e.episode_seed FROM groups g JOIN episodes e ON e.group_id = g.id"
        " WHERE g.phase = ? AND g.step = ? ORDER BY g.group_index, e.member",
        (phase, step),
    ).fetchall()
    if [seed for (seed,) in seeds] != [episode.seed for group in groups for episode in group.episodes]:
        raise JournalMismatch(f"the episodes of step {step} of {phase} were drawn with other seeds; {fix}")
