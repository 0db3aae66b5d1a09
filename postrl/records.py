"""Trajectories as Parquet: what a notebook opens with pandas or DuckDB, and what Grain reads back for training.

One file for each phase and step, one row for each episode, faults included:

    import pandas; pandas.read_parquet("runs/quickstart/trajectories/")
    duckdb.sql("select kind, avg(success::int) from 'runs/quickstart/trajectories/rl-*.parquet' group by all")

Token columns hold the concatenated sequence of an episode (prompt, completion, prompt, completion, ...): `token_T`,
`is_policy_T` (sampled by the policy), `logprob_T` (0 where not sampled) and `version_T` (-1 where not sampled). The
same episodes always give the same bytes. Shape legend: T tokens of one episode.
"""

from __future__ import annotations

import functools
import itertools
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from postrl.codec import outcome_message, outcome_name
from postrl.contracts import InfraFault, Scored, Turn, outcome_reward
from postrl.scheduler.groups import RecordedEpisode

_TURN = pa.struct(
    {
        "prompt": pa.string(),
        "reply": pa.string(),
        "call_name": pa.string(),
        "call_words": pa.list_(pa.string()),
        "call_body": pa.string(),
        "observation": pa.string(),
        "stop": pa.string(),
        "num_prompt_tokens": pa.int32(),
        "num_policy_tokens": pa.int32(),
    }
)
_COMMAND = pa.struct(
    {
        "argv": pa.list_(pa.string()),
        "exit_code": pa.int32(),
        "killed_by": pa.string(),
        "wall_s": pa.float64(),
        "cpu_s": pa.float64(),
        "max_rss_mb": pa.float64(),
        "stdout": pa.string(),
        "stderr": pa.string(),
    }
)
SCHEMA = pa.schema(
    {
        "phase": pa.string(),
        "step": pa.int32(),
        "group": pa.int32(),
        "member": pa.int32(),
        "attempt": pa.int32(),
        "domain": pa.string(),
        "kind": pa.string(),
        "split": pa.string(),
        "task_id": pa.string(),
        "task_seed": pa.int64(),
        "task_index": pa.int64(),
        "episode_seed": pa.int64(),
        "outcome": pa.string(),
        "message": pa.string(),
        "fault_stage": pa.string(),
        "reward": pa.float64(),
        "success": pa.bool_(),
        "parts": pa.list_(pa.struct({"name": pa.string(), "value": pa.float64()})),
        "findings": pa.list_(pa.struct({"subject": pa.string(), "message": pa.string()})),
        "verifier": pa.string(),
        "terminated": pa.bool_(),
        "truncated": pa.bool_(),
        "num_turns": pa.int32(),
        "num_tool_calls": pa.int32(),
        "num_prompt_tokens": pa.int32(),
        "num_policy_tokens": pa.int32(),
        "num_commands": pa.int32(),
        "command_wall_s": pa.float64(),
        "sandbox_s": pa.float64(),
        "system": pa.string(),
        "prompt": pa.string(),
        "turns": pa.list_(_TURN),
        "commands": pa.list_(_COMMAND),
        "token_T": pa.list_(pa.int32()),
        "is_policy_T": pa.list_(pa.bool_()),
        "logprob_T": pa.list_(pa.float32()),
        "version_T": pa.list_(pa.int32()),
    }
)
TOKEN_COLUMNS = ("token_T", "is_policy_T", "logprob_T", "version_T")
_ROWS_PER_GROUP = 64


def trajectory_path(run_dir: str | os.PathLike[str], phase: str, step: int) -> Path:
    """`<run_dir>/trajectories/rl-000012.parquet`; the colon of `evaluate:base` becomes a dash."""
    return Path(run_dir) / "trajectories" / f"{phase.replace(':', '-')}-{step:06d}.parquet"


# -------------------------------------------------------------------------------------------------------- writing


def _text(text: str | None) -> str | None:
    # Bytes that a hostile command printed may have become lone surrogates, which Parquet's UTF-8 can't hold. The exact
    # reply is in the tokens; the text is for people.
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def concatenated(turns: Sequence[Turn]) -> dict[str, np.ndarray]:
    """The episode's sequence: `token_T` int32, `is_policy_T` bool, `logprob_T` float32, `version_T` int32."""
    token, is_policy, logprob, version = [], [], [], []
    for turn in turns:
        num_prompt, completion = len(turn.prompt_T), turn.completion
        token += [turn.prompt_T, completion.token_T]
        is_policy += [np.zeros(num_prompt, bool), np.ones(len(completion.token_T), bool)]
        logprob += [np.zeros(num_prompt, np.float32), completion.logprob_T]
        version += [np.full(num_prompt, -1, np.int32), completion.version_T]
    return {
        "token_T": np.concatenate(token or [np.zeros(0)]).astype(np.int32),
        "is_policy_T": np.concatenate(is_policy or [np.zeros(0)]).astype(bool),
        "logprob_T": np.concatenate(logprob or [np.zeros(0)]).astype(np.float32),
        "version_T": np.concatenate(version or [np.zeros(0)]).astype(np.int32),
    }


def _turn_row(turn: Turn, prompt: str) -> dict[str, Any]:
    call = turn.call
    return {
        "prompt": _text(prompt),
        "reply": _text(turn.text),
        "call_name": None if call is None else _text(call.name),
        "call_words": None if call is None else [_text(word) for word in call.words],
        "call_body": None if call is None else _text(call.body),
        "observation": _text(turn.observation),
        "stop": turn.completion.stop.value,
        "num_prompt_tokens": len(turn.prompt_T),
        "num_policy_tokens": len(turn.completion.token_T),
    }


def _trajectory_columns(row: RecordedEpisode) -> dict[str, Any]:
    trajectory = row.trajectory
    if trajectory is None:
        return {}
    prompts = [row.episode.task.prompt, *(turn.observation for turn in trajectory.turns)]
    return {
        "terminated": trajectory.terminated,
        "truncated": trajectory.truncated,
        "num_turns": len(trajectory.turns),
        "num_tool_calls": sum(turn.call is not None for turn in trajectory.turns),
        "num_prompt_tokens": sum(len(turn.prompt_T) for turn in trajectory.turns),
        "num_policy_tokens": trajectory.num_policy_tokens,
        "num_commands": len(trajectory.commands),
        "command_wall_s": sum(command.wall_s for command in trajectory.commands),
        "sandbox_s": trajectory.sandbox_s,
        "turns": [_turn_row(turn, prompt) for turn, prompt in zip(trajectory.turns, prompts, strict=False)],
        "commands": [
            {
                "argv": [_text(word) for word in command.argv],
                "exit_code": command.exit_code,
                "killed_by": command.killed_by,
                "wall_s": command.wall_s,
                "cpu_s": command.cpu_s,
                "max_rss_mb": command.max_rss_mb,
                "stdout": _text(command.stdout_excerpt),
                "stderr": _text(command.stderr_excerpt),
            }
            for command in trajectory.commands
        ],
        **concatenated(trajectory.turns),
    }


def _row(row: RecordedEpisode) -> dict[str, Any]:
    key, task, outcome = row.episode.key, row.episode.task, row.outcome
    verdict = outcome.verdict if isinstance(outcome, Scored) else None
    return {
        "phase": key.phase,
        "step": key.step,
        "group": key.group,
        "member": key.member,
        "attempt": row.attempt,
        "domain": task.domain,
        "kind": task.kind,
        "split": task.split,
        "task_id": task.id,
        "task_seed": task.seed,
        "task_index": task.index,
        "episode_seed": row.episode.seed,
        "outcome": outcome_name(outcome),
        "message": _text(outcome_message(outcome)),
        "fault_stage": _text(outcome.stage) if isinstance(outcome, InfraFault) else None,
        "reward": outcome_reward(outcome),
        "success": verdict is not None and verdict.success,
        "parts": [{"name": _text(n), "value": v} for n, v in verdict.parts.items()] if verdict else [],
        "findings": [{"subject": _text(f.subject), "message": _text(f.message)} for f in verdict.findings]
        if verdict
        else [],
        "verifier": _text(verdict.verifier) if verdict else None,
        "system": _text(task.system),
        "prompt": _text(task.prompt),
        **_trajectory_columns(row),
    }


def write_trajectories(path: str | os.PathLike[str], rows: Sequence[RecordedEpisode]) -> Path:
    """Writes the episodes of one step, in the order of their keys, and returns the path.

    The file appears whole or not at all: it is written under another name, synced and renamed, and so replaces what a
    killed run may have left. Raises ValueError when an episode occurs twice.
    """
    path = Path(path)
    ordered = sorted(rows, key=lambda row: row.episode.key)
    for row, following in itertools.pairwise(ordered):
        if row.episode.key == following.episode.key:
            raise ValueError(f"episode {row.episode.key} occurs twice among the rows for {path.name}")
    columns = [_row(row) for row in ordered]
    table = pa.table({field.name: pa.array([row.get(field.name) for row in columns], field.type) for field in SCHEMA})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        pq.write_table(table, file, compression="zstd", row_group_size=_ROWS_PER_GROUP)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return path


# -------------------------------------------------------------------------------------------------------- reading


def _paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    if isinstance(paths, str | os.PathLike):
        path = Path(paths)
        return sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    return [Path(path) for path in paths]


def _to_python(table: pa.Table) -> list[dict[str, Any]]:
    rows = [dict[str, Any]() for _ in range(table.num_rows)]
    for name in table.column_names:
        column = table.column(name)
        if name in TOKEN_COLUMNS:
            values = [_array(column[index], name) for index in range(table.num_rows)]
        else:
            values = column.to_pylist()
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def read_trajectories(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], columns: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Rows as dicts by column name, from one file, several, or all of a directory (in the order of their names).

    Token columns are numpy arrays, bit for bit as sampled; None where an episode has no trajectory. `columns` limits
    what is read: leave out what you don't need from large runs.
    """
    rows = []
    for path in _paths(paths):
        with pq.ParquetFile(path) as file:
            rows += _to_python(file.read(columns=None if columns is None else list(columns)))
    return rows


def _array(scalar: Any, name: str) -> np.ndarray | None:
    if not scalar.is_valid:
        return None
    dtype = SCHEMA.field(name).type.value_type.to_pandas_dtype()
    return np.array(scalar.values.to_numpy(zero_copy_only=False), dtype=dtype)


_SOURCE_COLUMNS = ("phase", "step", "group", "member", "domain", "kind", "task_id", "reward", "success", *TOKEN_COLUMNS)


@functools.lru_cache(maxsize=8)
def _row_group(path: str, row_group: int, modified_ns: int) -> pa.Table:
    # modified_ns is part of the key: a resumed run writes a file of the same name again.
    del modified_ns
    with pq.ParquetFile(path) as file:
        return file.read_row_group(row_group, columns=list(_SOURCE_COLUMNS))


@dataclass(frozen=True)
class _Block:
    """The rows of one row group that have a trajectory."""

    path: str
    row_group: int
    modified_ns: int
    rows: tuple[int, ...]


class TrajectorySource:
    """The episodes of some Parquet files as a random-access source for Grain (`grain.MapDataset.source(...)`).

    Element i is a dict: `token_T` int32 [T], `is_policy_T` bool [T], `logprob_T` float32 [T], `version_T` int32 [T],
    `reward` float32 (NaN: none counts), `success`, `phase`, `step`, `group`, `member`, `domain`, `kind`, `task_id`.
    Episodes without a trajectory are left out. Row groups are read when asked for, so that files may exceed memory;
    instances are picklable, for Grain's worker processes.
    """

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]):
        blocks, ends, num_rows = [], [], 0
        for path in _paths(paths):
            modified_ns = path.stat().st_mtime_ns
            with pq.ParquetFile(path) as file:
                for row_group in range(file.num_row_groups):
                    num_turns = file.read_row_group(row_group, columns=["num_turns"]).column(0).to_pylist()
                    rows = tuple(index for index, num in enumerate(num_turns) if num)
                    if rows:
                        num_rows += len(rows)
                        blocks.append(_Block(str(path), row_group, modified_ns, rows))
                        ends.append(num_rows)
        self._blocks, self._ends = tuple(blocks), tuple(ends)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"episode {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        block = self._blocks[number]
        offset = block.rows[index - (self._ends[number - 1] if number else 0)]
        table = _row_group(block.path, block.row_group, block.modified_ns)
        (row,) = _to_python(table.slice(offset, 1))
        row["reward"] = np.float32(np.nan if row["reward"] is None else row["reward"])
        return row

    def __repr__(self) -> str:
        # Grain compares this text when it restores an iterator.
        return f"TrajectorySource(episodes={len(self)}, files={len({block.path for block in self._blocks})})"
