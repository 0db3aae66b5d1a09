"""What it cost, and what broke: wall time, tokens, tool calls, sandbox seconds, faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from postrl.codec import OUTCOME_NAMES
from postrl.progress import clock_text
from postrl.report.charts import (
    series_color,
)
from postrl.report.markup import Html, joined, tag
from postrl.report.run_data import (
    DomainResult,
    RunData,
    results,
    totals,
)
from postrl.report.tables import row, table


def cost(run: RunData) -> Html:
    summary = run.summary or {}
    phases_s: Mapping[str, float] = summary.get("phases_s") or {}
    overall, parts = results(run)
    if not phases_s and not run.episodes.num_rows:
        return tag("p", "Nothing has been spent yet.", class_="muted")
    return joined(
        [
            _phase_bar(phases_s, summary.get("wall_s")) if phases_s else None,
            _domain_cost(run, [*parts, overall]),
            _per_point(phases_s, overall, run),
        ]
    )


def _phase_bar(phases_s: Mapping[str, float], wall_s: float | None) -> Html:
    total_s = sum(phases_s.values()) or 1.0
    colors = {name: series_color(index) for index, name in enumerate(phases_s)}
    bar = [
        tag(
            "span", style=f"background: {colors[name]}; flex: {seconds / total_s:.4f}", title=f"{name}: {seconds:.0f} s"
        )
        for name, seconds in phases_s.items()
    ]
    key = [
        tag("span", tag("i", style=f"background: {colors[name]}"), f"{name.replace('_', ' ')} {clock_text(seconds)}")
        for name, seconds in phases_s.items()
    ]
    whole = f"Wall time {clock_text(wall_s if wall_s is not None else total_s)}, by phase"
    return joined([tag("h3", whole), tag("div", bar, class_="share"), tag("div", key, class_="key")])


def _domain_cost(run: RunData, parts: Sequence[DomainResult]) -> Html | None:
    if not run.episodes.num_rows:
        return None
    gains = {result.name: result.gain() for result in parts}
    in_rl = run.episodes.filter(pc.equal(run.episodes["phase"], "rl"))  # pyright: ignore[reportAttributeAccessIssue]
    by_domain = totals(run.episodes, "domain")
    spent = {item["domain"]: item for item in totals(in_rl, "domain")}

    def cells(name: str | None, whole: Sequence[Mapping[str, Any]], rl: Sequence[Mapping[str, Any]]) -> list[object]:
        gain, points = gains.get(name), None
        if gain is not None and gain > 0:
            points = 100 * gain
        tokens, sandbox_s = (sum(item[key] for item in rl) for key in ("num_policy_tokens", "sandbox_s"))
        return [
            name or "all",
            f"{sum(item['num_episodes'] for item in whole):,}",
            f"{sum(item['num_policy_tokens'] for item in whole):,}",
            f"{sum(item['num_tool_calls'] for item in whole):,}",
            f"{sum(item['sandbox_s'] for item in whole):,.0f}",
            f"{points:.0f}" if points else "–",
            f"{tokens / points:,.0f}" if points else "–",
            f"{sandbox_s / points:,.1f}" if points else "–",
        ]

    rows = [
        row(cells(item["domain"], [item], [spent[item["domain"]]] if item["domain"] in spent else []))
        for item in by_domain
    ]
    rows.append(row(cells(None, by_domain, list(spent.values())), class_="total"))
    head = ["domain", "episodes", "policy tokens", "tool calls", "sandbox s", "points gained", "RL tokens a point",
            "RL sandbox s a point"]  # fmt: skip
    return joined([tag("h3", "By domain, all phases"), table(head, rows)])


def _per_point(phases_s: Mapping[str, float], overall: DomainResult, run: RunData) -> Html | None:
    gain = overall.gain()
    if not gain or gain <= 0 or "rl" not in phases_s:
        return None
    return tag(
        "p",
        f"One point of held-out success cost {phases_s['rl'] / (100 * gain):.1f} s of reinforcement learning.",
        class_="muted",
    )


def faults(run: RunData) -> Html:
    if not run.episodes.num_rows and run.counts is None:
        return tag("p", "Neither journal nor trajectories are there to count them.", class_="muted")
    parts: list[Html | None] = []
    names = sorted(set(run.episodes["domain"].to_pylist()))
    counted = {
        (item["domain"], item["outcome"]): item["num_episodes"] for item in totals(run.episodes, "domain", "outcome")
    }
    rows = []
    for name in names:
        numbers = [counted.get((name, outcome), 0) for outcome in OUTCOME_NAMES]
        broken = sum(numbers) - numbers[0] - numbers[1]
        rows.append(
            row([name, *(f"{number:,}" for number in numbers), f"{100 * broken / max(sum(numbers), 1):.1f}\u00a0%"])
        )
    if rows:
        head = ["domain", *(name.replace("_", " ") for name in OUTCOME_NAMES), "not counted"]
        parts += [tag("h3", "How episodes ended"), table(head, rows)]
    stages: Counter[tuple[str, str]] = Counter()
    for phase in run.counts.phases.values() if run.counts else ():
        for domain, by_stage in phase.faults.items():
            stages.update({(domain, stage): number for stage, number in by_stage.items()})
    if stages:
        rows = [row([f"{domain}: {stage}", f"{number:,}"]) for (domain, stage), number in sorted(stages.items())]
        parts += [
            tag("h3", "Faulted attempts, those included that a later attempt made good"),
            table(["", "attempts"], rows),
        ]
    elif run.counts is not None:
        parts.append(tag("p", "No attempt failed through a fault of ours.", class_="muted"))
    messages = Counter(
        (item["outcome"], item["message"])
        for item in run.episodes.select(["outcome", "message"]).to_pylist()
        if item["outcome"] != "scored"
    )
    if messages:
        rows = [
            row([f"{outcome.replace('_', ' ')}: {message[:300]}", f"{number:,}"])
            for (outcome, message), number in messages.most_common(8)
        ]
        parts += [tag("h3", "What they said"), table(["", "episodes"], rows)]
    return joined(parts)
