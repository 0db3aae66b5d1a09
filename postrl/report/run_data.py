"""What a report knows about a run: everything in its directory that can be read, and what is missing, said plainly.

A run that was killed, or is still going, has no summary and perhaps no audit; the report then shows what there is.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from postrl.intervals import Estimate, success_rate
from postrl.metrics import parse_lines
from postrl.records import SCHEMA, read_trajectories, trajectory_path
from postrl.scheduler.journal import Journal
from postrl.scheduler.journal_audit import AuditCounts

STAGES = ("base", "cold_start", "rl")
STAGE_NAMES = {"base": "base", "cold_start": "cold start", "rl": "RL"}
_SCALARS = (
    *("phase", "step", "group", "member", "attempt", "domain", "kind", "task_id", "outcome", "message", "fault_stage"),
    *("reward", "success", "num_turns", "num_tool_calls", "num_policy_tokens", "num_commands", "sandbox_s"),
)


@dataclass(frozen=True)
class Rate:
    """The success of one policy on a set of held-out tasks."""

    value: float
    ci: tuple[float, float] | None
    num_tasks: int | None


@dataclass(frozen=True)
class DomainResult:
    """`name` None stands for all domains together."""

    name: str | None
    stages: Mapping[str, Rate]
    """By stage: base, cold_start, rl; those that were evaluated."""
    kinds: Mapping[str, Mapping[str, float]]
    """Kind -> stage -> success."""

    def gain(self) -> float | None:
        """RL over cold start (over base where there is none), a fraction."""
        before = self.stages.get("cold_start") or self.stages.get("base")
        after = self.stages.get("rl")
        return after.value - before.value if before and after else None


@dataclass(frozen=True)
class RunData:
    """One run directory, read once."""

    run_dir: Path
    config: dict[str, Any] | None
    summary: dict[str, Any] | None
    audit: dict[str, Any] | None
    metrics: tuple[dict[str, Any], ...]
    counts: AuditCounts | None
    files: tuple[Path, ...]
    """The trajectory files that could be read."""
    episodes: pa.Table
    """One row an episode, without its texts and tokens."""
    notes: tuple[str, ...]
    """What couldn't be read, in plain sentences."""

    @property
    def name(self) -> str:
        return self.run_dir.name

    @property
    def finished(self) -> bool:
        return self.summary is not None


def _read_json(path: Path, notes: list[str], meaning: str) -> dict[str, Any] | None:
    if not path.exists():
        notes.append(f"{path.name} is missing: {meaning}.")
        return None
    try:
        value = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} can't be read ({error}).")
        return None
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds {type(value).__name__}, not an object.")
        return None
    return value


def _read_metrics(path: Path, notes: list[str]) -> tuple[dict[str, Any], ...]:
    if not path.exists():
        notes.append("metrics.jsonl is missing: no step has been finished.")
        return ()
    try:
        return tuple(parse_lines(path.read_text(), path.name))
    except ValueError as error:
        notes.append(f"{error}.")
        return ()


def _read_counts(path: Path, notes: list[str]) -> AuditCounts | None:
    try:
        with Journal.open(path, read_only=True) as journal:
            return journal.audit_counts()
    except FileNotFoundError:
        notes.append("journal.db is missing.")
    except (ValueError, sqlite3.Error) as error:
        notes.append(f"journal.db can't be read ({error}).")
    return None


def _read_episodes(run_dir: Path, notes: list[str]) -> tuple[tuple[Path, ...], pa.Table]:
    schema = pa.schema([SCHEMA.field(name) for name in _SCALARS])
    files, tables = [], []
    for path in sorted((run_dir / "trajectories").glob("*.parquet")):
        try:
            with pq.ParquetFile(path) as file:
                tables.append(file.read(columns=list(_SCALARS)).cast(schema))
            files.append(path)
        except (pa.ArrowException, ValueError, OSError) as error:
            notes.append(f"{path.name} can't be read ({error}).")
    if not tables:
        notes.append("There are no trajectories yet.")
    return tuple(files), pa.concat_tables(tables) if tables else schema.empty_table()


def load_run(run_dir: Path) -> RunData:
    """Reads the run directory. Raises FileNotFoundError when there is no such directory; nothing else."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run directory at {run_dir}")
    notes: list[str] = []
    files, episodes = _read_episodes(run_dir, notes)
    return RunData(
        run_dir=run_dir.resolve(),
        summary=_read_json(run_dir / "summary.json", notes, "the run hasn't finished, or was stopped"),
        audit=_read_json(run_dir / "audit.json", notes, "the invariants haven't been checked"),
        config=_read_json(run_dir / "config.json", notes, "what was run isn't on record"),
        metrics=_read_metrics(run_dir / "metrics.jsonl", notes),
        counts=_read_counts(run_dir / "journal.db", notes),
        files=files,
        episodes=episodes,
        notes=tuple(notes),
    )


# -------------------------------------------------------------------------------------------------------- results


def _rate(data: Mapping[str, Any]) -> Rate:
    ci = data.get("ci")
    return Rate(float(data["success"]), (float(ci[0]), float(ci[1])) if ci else None, data.get("num_tasks"))


def _from_summary(name: str | None, data: Mapping[str, Any]) -> DomainResult:
    stages = {stage: _rate(data[stage]) for stage in STAGES if data.get(stage)}
    return DomainResult(name, stages, data.get("kinds") or {})


def _from_episodes(name: str | None, rows: list[dict[str, Any]]) -> DomainResult:
    def of(stage: str, kind: str | None = None) -> Estimate | None:
        wins = [
            row["success"]
            for row in rows
            if row["phase"] == f"evaluate:{stage}"
            and row["reward"] is not None
            and name in (None, row["domain"])
            and kind in (None, row["kind"])
        ]
        return success_rate(sum(wins), len(wins)) if wins else None

    def num(stage: str) -> int:
        return sum(
            row["phase"] == f"evaluate:{stage}" and row["reward"] is not None and name in (None, row["domain"])
            for row in rows
        )

    stages = {stage: Rate(rate.value, rate.ci, num(stage)) for stage in STAGES if (rate := of(stage))}
    kinds = sorted({row["kind"] for row in rows if name == row["domain"]})
    return DomainResult(
        name, stages, {kind: {stage: rate.value for stage in STAGES if (rate := of(stage, kind))} for kind in kinds}
    )


def results(run: RunData) -> tuple[DomainResult, list[DomainResult]]:
    """Success overall and per domain: from the summary, or while there is none from the evaluations' episodes."""
    if run.summary is not None:
        domains = run.summary.get("domains") or {}
        overall = _from_summary(None, run.summary.get("overall") or {})
        return overall, [_from_summary(name, data) for name, data in domains.items()]
    rows = run.episodes.filter(pc.starts_with(run.episodes["phase"], "evaluate:"))  # pyright: ignore[reportAttributeAccessIssue]
    rows = rows.select(["phase", "domain", "kind", "success", "reward"]).to_pylist()
    names = sorted({row["domain"] for row in rows})
    return _from_episodes(None, rows), [_from_episodes(name, rows) for name in names]


def totals(table: pa.Table, *keys: str) -> list[dict[str, Any]]:
    """Sums over episodes by `keys`: num_episodes, num_policy_tokens, num_tool_calls, sandbox_s, num_solved."""
    sums = ("num_policy_tokens", "num_tool_calls", "sandbox_s", "success")
    grouped = table.group_by(list(keys)).aggregate([*((name, "sum") for name in sums), ([], "count_all")])
    rows = [
        {key: row[key] for key in keys}
        | {"num_episodes": row["count_all"], "num_solved": row["success_sum"] or 0}
        | {name: row[f"{name}_sum"] or 0 for name in sums[:3]}
        for row in grouped.to_pylist()
    ]
    return sorted(rows, key=lambda row: [str(row[key]) for key in keys])


# -------------------------------------------------------------------------------------------------------- metrics


def metric_columns(run: RunData, phase: str) -> tuple[list[int], dict[str, list[float | None]]]:
    """Steps of a phase, and by metric its value at each of them; None where missing or not finite."""
    rows = sorted((row for row in run.metrics if row["phase"] == phase), key=lambda row: row["step"])
    names = sorted({name for row in rows for name in row if name not in ("phase", "step")})
    columns: dict[str, list[float | None]] = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = [value if isinstance(value, int | float) else None for value in values]
    return [row["step"] for row in rows], columns


def not_finite(run: RunData) -> Iterator[tuple[str, int, str, str]]:
    """(phase, step, name, text) of every metric that was NaN or infinite."""
    for row in run.metrics:
        for name, value in row.items():
            if isinstance(value, str) and name != "phase":
                yield row["phase"], row["step"], name, value


# -------------------------------------------------------------------------------------------------------- episodes


def full_rows(run: RunData, wanted: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `wanted` (with phase, step, group, member) again, texts included and tokens left out."""
    columns = [name for name in SCHEMA.names if not name.endswith("_T")]
    by_step: dict[tuple[str, int], list[dict[str, Any]]] = {}
    found = []
    for row in wanted:
        place = (row["phase"], row["step"])
        if place not in by_step:
            by_step[place] = read_trajectories(trajectory_path(run.run_dir, *place), columns)
        found += [full for full in by_step[place] if (full["group"], full["member"]) == (row["group"], row["member"])]
    return found
