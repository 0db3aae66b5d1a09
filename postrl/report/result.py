"""What came out: the headline, and success by domain and kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from postrl.records import read_trajectories
from postrl.report.charts import (
    Mark,
    interval_chart,
    meter,
    percent,
)
from postrl.report.markup import Html, joined, tag
from postrl.report.run_data import (
    STAGE_NAMES,
    STAGES,
    DomainResult,
    Rate,
    RunData,
    results,
)
from postrl.report.tables import row, table

STAGE_COLORS = {"base": "var(--stage-base)", "cold_start": "var(--stage-cold)", "rl": "var(--stage-rl)"}


def interval_text(rate: Rate) -> str:
    return f"95\u00a0% interval {100 * rate.ci[0]:.0f} to {100 * rate.ci[1]:.0f}" if rate.ci else ""


def headline(run: RunData) -> Html:
    overall, domains = results(run)
    if not overall.stages:
        return tag("p", "No evaluation has been finished, so there is no result to show.", class_="verdict-line")
    tiles = [
        tag(
            "div",
            tag("span", class_="dot", style=f"background: {STAGE_COLORS[stage]}"),
            tag("span", STAGE_NAMES[stage], class_="name"),
            tag("span", percent(rate.value), tag("small", interval_text(rate)), class_="value"),
            class_="stage",
        )
        for stage, rate in overall.stages.items()
    ]
    rows = [("overall" if result.name is None else result.name, _marks(result)) for result in (overall, *domains)]
    chart = tag(
        "figure",
        tag("figcaption", "Held-out success", tag("small", "dot: rate · line: 95\u00a0% interval")),
        interval_chart("Held-out success by domain", rows),
    )
    return joined(
        [_verdict_line(run, overall), tag("div", tag("div", tiles, class_="stages"), chart, class_="headline")]
    )


def _marks(result: DomainResult) -> list[Mark]:
    return [
        Mark(STAGE_NAMES[stage], rate.value, *(rate.ci or (rate.value, rate.value)), STAGE_COLORS[stage])
        for stage, rate in result.stages.items()
    ]


def _verdict_line(run: RunData, overall: DomainResult) -> Html:
    gain = (run.summary or {}).get("gain")
    gained = overall.gain()
    num_tasks = next((rate.num_tasks for rate in overall.stages.values() if rate.num_tasks), None)
    on = f" on {num_tasks} held-out tasks" if num_tasks else ""
    if "rl" not in overall.stages or gained is None:
        last = list(overall.stages)[-1]
        return tag(
            "p", f"So far the {STAGE_NAMES[last]} solves {percent(overall.stages[last].value)}{on}. Reinforcement "
            "learning hasn't been evaluated.", class_="verdict-line",
        )  # fmt: skip
    before = "the cold start" if "cold_start" in overall.stages else "the base"
    points = gain["points"] if gain else 100 * gained
    verb = "lifted" if points > 0 else "lowered"
    ci = f" (95\u00a0% interval {gain['ci'][0]:.0f} to {gain['ci'][1]:.0f})" if gain else ""
    if not points or (gain and gain["ci"][0] <= 0 <= gain["ci"][1]):
        change = f", {points:+.0f} points{ci}" if gain else ""
        return tag(
            "p", "Reinforcement learning ", tag("strong", "made no measurable difference"), f" to {before}{change}{on}.",
            class_="verdict-line",
        )  # fmt: skip
    return tag(
        "p", "Reinforcement learning ", tag("strong", f"{verb} success by {abs(points):.0f} points"),
        f"{ci} over {before}{on}.", class_="verdict-line",
    )  # fmt: skip


def _kind_rate(value: Any) -> float | None:
    if isinstance(value, Mapping):
        value = value.get("success")
    return float(value) if isinstance(value, int | float) else None


def _points(before: float | None, after: float | None) -> Html:
    if before is None or after is None:
        return tag("span", "–", class_="muted")
    points = round(100 * (after - before))
    return tag("span", f"{points:+d}" if points else "0", class_="good" if points > 0 else "bad" if points else "muted")


def domains(run: RunData) -> Html:
    overall, parts = results(run)
    if not overall.stages:
        return tag("p", "No evaluation has been finished.", class_="muted")
    rows = []
    for result in (*parts, overall):
        before = result.stages.get("cold_start") or result.stages.get("base")
        after = result.stages.get("rl")
        cells: list[object] = [result.name or "overall"]
        for stage in STAGES:
            rate = result.stages.get(stage)
            cells.append("–" if rate is None else joined([percent(rate.value), meter(rate.value, STAGE_COLORS[stage])]))
        cells.append(_points(before.value if before else None, after.value if after else None))
        cells.append(next((str(rate.num_tasks) for rate in result.stages.values() if rate.num_tasks), "–"))
        rows.append(row(cells, class_="domain"))
        for kind, values in result.kinds.items():
            rates = {stage: _kind_rate(values.get(stage)) for stage in STAGES}
            shown = [
                "–" if rate is None else joined([percent(rate), meter(rate, STAGE_COLORS[stage])])
                for stage, rate in rates.items()
            ]
            start = rates["base"] if rates["cold_start"] is None else rates["cold_start"]
            rows.append(row([kind, *shown, _points(start, rates["rl"]), ""], first_class="kind"))
    return joined([table(["", "base", "cold start", "RL", "gain, points", "tasks"], rows), unsolved(run, parts)])


def unsolved(run: RunData, parts: Sequence[DomainResult]) -> Html | None:
    """Names the kinds that the last evaluation never solved, and what had been tried on them."""
    stage = next((stage for stage in reversed(STAGES) if any(stage in result.stages for result in parts)), None)
    stuck = [
        (result.name or "", kind)
        for result in parts
        for kind, values in result.kinds.items()
        if stage is not None and _kind_rate(values.get(stage)) == 0
    ]
    if not stuck:
        return None
    wanted = {kind for _, kind in stuck}
    columns = ["phase", "domain", "kind", "success", "reward", "findings"]
    tried = [episode for path in run.files for episode in read_trajectories(path, columns) if episode["kind"] in wanted]
    items = []
    for domain, kind in stuck:
        mine = [episode for episode in tried if (episode["domain"], episode["kind"]) == (domain, kind)]
        items.append(tag("li", tag("strong", f"{domain} / {kind}"), ": " + _what_was_tried(mine)))
    return joined([tag("h3", "Kinds that stayed at 0, and what was tried"), tag("ul", items)])


def _what_was_tried(episodes: Sequence[Mapping[str, Any]]) -> str:
    demonstrations = sum(episode["phase"] == "cold_start" for episode in episodes)
    sampled = [episode for episode in episodes if episode["phase"] == "rl"]
    solved = sum(episode["success"] for episode in sampled)
    best = max((episode["reward"] or 0.0 for episode in sampled), default=None)
    findings = Counter(
        f"{finding['subject']}: {finding['message']}" for episode in sampled for finding in episode["findings"] or ()
    )
    parts = [f"{demonstrations} demonstrations, {len(sampled)} sampled episodes"]
    if sampled:
        parts.append(f"{solved} of them solved, best reward {best:.2f}")
    if findings:
        finding, number = findings.most_common(1)[0]
        parts.append(f"most often “{finding}” ({number} times)")
    return "; ".join(parts) + "."
