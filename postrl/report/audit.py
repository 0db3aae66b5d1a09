"""What was checked: the run's invariants with their evidence, the journal's recount, the configuration."""

from __future__ import annotations

import json
from typing import Any

from postrl.report.markup import Html, joined, tag
from postrl.report.run_data import (
    RunData,
)
from postrl.report.tables import row, table

_STATUS_CLASS = {"passed": "good", "failed": "bad"}


def audit(run: RunData) -> Html:
    if run.audit is None:
        return joined(
            [tag("p", "Not run: there is no readable audit.json in the run directory.", class_="warn"), _counted(run)]
        )
    checks = run.audit.get("checks") or []
    items = []
    for check in sorted(checks, key=lambda check: check.get("status") == "passed"):
        status = str(check.get("status", "not run"))
        evidence = check.get("evidence")
        step = check.get("step")
        items.append(
            tag(
                "div",
                tag("div", status, class_=f"status {_STATUS_CLASS.get(status, 'warn')}"),
                tag(
                    "div",
                    tag("strong", str(check.get("name", ""))),
                    tag("span", f" · step {step}", class_="muted") if step is not None else None,
                    tag("div", str(check.get("sentence", ""))),
                    tag("details", tag("summary", "evidence"), tag("pre", pretty(evidence))) if evidence else None,
                ),
                class_="check",
            )
        )
    num_passed = sum(check.get("status") == "passed" for check in checks)
    return joined([tag("p", f"{num_passed} of {len(checks)} checks passed.", class_="lead"), items, _counted(run)])


def _counted(run: RunData) -> Html | None:
    if run.counts is None:
        return None
    rows = [
        row([phase.phase, f"{phase.num_prompts:,}", f"{phase.num_counted:,}", f"{phase.num_episodes:,}",
             f"{phase.num_open:,}", "–" if phase.last_step is None else str(phase.last_step)])
        for phase in run.counts.phases.values()
    ]  # fmt: skip
    problems = run.counts.problems()
    said = "; ".join(problems) + "." if problems else "The journal holds each committed prompt exactly once."
    head = ["phase", "prompts drawn", "counted", "episodes", "open", "last committed step"]
    return joined(
        [tag("h3", "The journal, recounted"), tag("p", said, class_="bad" if problems else "muted"), table(head, rows)]
    )


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def configuration(run: RunData) -> Html:
    if run.config is None:
        return tag("p", "config.json is missing or unreadable.", class_="muted")
    return tag("details", tag("summary", "show config.json"), tag("pre", pretty(run.config)))
