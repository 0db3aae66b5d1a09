"""The end of a run: `summary.json`, the table that a person reads, and the report."""

from __future__ import annotations

import json
import math
import resource
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from postrl.intervals import Estimate, paired_gain, success_rate
from postrl.records import read_trajectories
from postrl.report import write_report
from postrl.rollout.engine import tree_digest
from postrl.run_state import Run

STAGES = ("base", "cold_start", "rl")
STAGE_TITLES = {"base": "base", "cold_start": "after cold start", "rl": "after RL"}


def finish(run: Run) -> Path:
    """Checks what can only be checked at the end, writes summary and report, prints the table; returns the directory."""
    check_end(run)
    # Of this process: its sandboxes are limited apart, and an interrupted run's earlier processes are not in it.
    peak_memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    summary = summarize(run.run_dir, run.phases_s) | {"peak_memory_mb": peak_memory_mb, "audit": run.audit.passed()}
    path = run.run_dir / "summary.json"
    partial = path.with_name(".summary.json.partial")
    partial.write_text(json.dumps(summary, indent=1))
    partial.replace(path)
    report = write_report(run.run_dir)
    run.progress.finish(table(summary), f"report: {report}")
    return run.run_dir


def check_end(run: Run) -> None:
    if run.frozen is not None:
        before = run.audit.evidence("base bytes on record")["digest"]
        after = tree_digest(run.parts.base.params)
        run.audit.check(
            "the base never changed",
            before == after,
            "The base's weights are the same bytes as before the run."
            if before == after
            else "The frozen base was written to during the run: the adapter was trained against a moving base.",
            before=before,
            after=after,
        )
    counts = run.journal.audit_counts()
    problems = counts.problems()
    run.audit.check(
        "each prompt counted once",
        not problems,
        "Every prompt drawn was counted exactly once, with every episode's outcome."
        if not problems
        else " ".join(problems),
        num_prompts={phase.phase: phase.num_prompts for phase in counts.phases.values()},
    )


def summarize(run_dir: Path, phases_s: dict[str, float]) -> dict[str, Any]:
    """The contents of `summary.json` but for the audit's word, from the run's Parquet files."""
    columns = [
        "phase",
        "domain",
        "kind",
        "task_id",
        "outcome",
        "success",
        "num_policy_tokens",
        "num_tool_calls",
        "sandbox_s",
    ]
    rows = read_trajectories(run_dir / "trajectories", columns=columns)
    scored: dict[str, dict[str, dict[str, Any]]] = {stage: {} for stage in STAGES}
    for row in rows:
        stage = row["phase"].removeprefix("evaluate:")
        if row["phase"].startswith("evaluate:") and stage in scored and row["outcome"] == "scored":
            scored[stage][row["task_id"]] = row

    def stage_result(keep: Any) -> dict[str, Any]:
        return {stage: _rate([r["success"] for r in scored[stage].values() if keep(r)]) for stage in STAGES}

    domains: dict[str, Any] = {}
    kinds: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        kinds[row["domain"]].add(row["kind"])
    for domain, names in sorted(kinds.items()):
        domains[domain] = stage_result(lambda r, domain=domain: r["domain"] == domain)
        domains[domain]["kinds"] = {
            kind: {
                stage: _mean(
                    [r["success"] for r in scored[stage].values() if (r["domain"], r["kind"]) == (domain, kind)]
                )
                for stage in STAGES
            }
            for kind in sorted(names)
        }
    both = sorted(scored["cold_start"].keys() & scored["rl"].keys())
    gain = paired_gain([scored["cold_start"][t]["success"] for t in both], [scored["rl"][t]["success"] for t in both])
    return {
        "domains": domains,
        "overall": stage_result(lambda r: True),
        "gain": {"points": 100 * gain.value, "ci": [100 * gain.low, 100 * gain.high]},
        "wall_s": sum(phases_s.values()),
        "phases_s": phases_s,
        "num_policy_tokens": sum(r["num_policy_tokens"] or 0 for r in rows if r["phase"] != "cold_start"),
        "num_tool_calls": sum(r["num_tool_calls"] or 0 for r in rows),
        "num_faults": sum(r["outcome"] == "infra_fault" for r in rows),
        "sandbox_s": sum(r["sandbox_s"] or 0.0 for r in rows),
    }


def table(summary: dict[str, Any]) -> Table:
    """Success on held-out tasks by domain and stage, with 95 % intervals, and what it cost."""
    title = f"success on {summary['overall']['rl']['num_tasks']} held-out tasks (95 % intervals)"
    result = Table(title=title, title_justify="left", caption=_cost(summary), caption_justify="left")
    result.add_column("domain")
    for stage in STAGES:
        result.add_column(STAGE_TITLES[stage], justify="right")
    for name, stages in [*summary["domains"].items(), ("overall", summary["overall"])]:
        result.add_row(name, *(_cell(stages[stage]) for stage in STAGES), style="bold" if name == "overall" else "")
    return result


def _cell(rate: dict[str, Any]) -> str:
    low, high = rate["ci"]
    return f"{100 * rate['success']:.0f} %  [{100 * low:.0f}, {100 * high:.0f}]"


def _cost(summary: dict[str, Any]) -> str:
    gain, minutes = summary["gain"], summary["wall_s"] / 60
    unclear = ": no measurable difference" if gain["ci"][0] <= 0 <= gain["ci"][1] else ""
    return (
        f"RL over cold start: {gain['points']:+.1f} points [{gain['ci'][0]:.1f}, {gain['ci'][1]:.1f}]{unclear}\n"
        f"{minutes:.1f} min · {summary['num_policy_tokens']:,} policy tokens · {summary['num_tool_calls']:,} tool calls · "
        f"{summary['sandbox_s']:,.0f} sandbox-seconds · {summary['num_faults']} faults · "
        f"{summary['peak_memory_mb'] / 1000:.1f} GB memory"
    )


def _rate(successes: list[bool]) -> dict[str, Any]:
    estimate: Estimate = success_rate(sum(successes), len(successes))
    value = 0.0 if math.isnan(estimate.value) else estimate.value
    return {"success": value, "ci": list(estimate.ci), "num_tasks": len(successes)}


def _mean(successes: list[bool]) -> float | None:
    return sum(successes) / len(successes) if successes else None
