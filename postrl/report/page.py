"""The page: its head, its sections in order, and the file."""

from __future__ import annotations

import os
from pathlib import Path

from postrl.progress import clock_text
from postrl.report.audit import audit, configuration
from postrl.report.cost import cost, faults
from postrl.report.curves import curves
from postrl.report.episodes import episodes
from postrl.report.markup import Html, joined, tag
from postrl.report.result import domains, headline
from postrl.report.run_data import RunData, load_run
from postrl.report.style import STYLE

# Belt and braces: every text is escaped, and if one were not, the browser would still run nothing and load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_SECTIONS = (
    ("curves", "Learning", "Faint: each step. Bold: running mean. Rest the pointer on a line for its values.", curves),
    ("domains", "Domains and kinds", "Success on held-out tasks, by kind of task.", domains),
    ("cost", "Cost", None, cost),
    (
        "faults",
        "Faults",
        "A fault of ours never becomes a reward: its episode is counted here and nowhere else.",
        faults,
    ),
    ("audit", "Audit", None, audit),
    ("episodes", "Best and worst episodes", None, episodes),
    ("config", "Configuration", None, configuration),
)


def _status(run: RunData) -> Html:
    status = "not run" if run.audit is None else str(run.audit.get("status", "not run"))
    class_ = {"passed": "good", "failed": "bad"}.get(status, "warn")
    pills = [tag("span", f"audit {status}", class_=f"pill {class_}")]
    if not run.finished:
        pills.append(tag("span", "not finished", class_="pill warn"))
    return joined(pills)


def _facts(run: RunData) -> str:
    facts = []
    for key, label in (("git_commit", "commit"), ("fingerprint", "fingerprint")):
        value = (run.config or {}).get(key)
        if isinstance(value, str):
            facts.append(f"{label} {value[:12]}")
    summary = run.summary or {}
    if "wall_s" in summary:
        facts.append(f"{clock_text(summary['wall_s'])} wall time")
    for key, label in (
        ("num_policy_tokens", "policy tokens"),
        ("num_tool_calls", "tool calls"),
        ("sandbox_s", "sandbox seconds"),
        ("num_faults", "faults"),
        ("peak_memory_mb", "MB of memory"),
    ):
        if key in summary:
            facts.append(f"{summary[key]:,.0f} {label.removesuffix('s') if summary[key] == 1 else label}")
    return " · ".join(facts)


def _notes(run: RunData) -> Html | None:
    notes = list(run.notes)
    if not run.finished and run.counts is not None:
        committed = [
            f"{phase.phase} up to step {phase.last_step}"
            for phase in run.counts.phases.values()
            if phase.last_step is not None
        ]
        notes.append(
            f"Committed: {', '.join(committed) or 'nothing yet'}. The same command resumes the run from there."
        )
    failed = [
        f"The audit failed: {check.get('sentence') or check.get('name')}"
        for check in (run.audit or {}).get("checks") or []
        if check.get("status") == "failed"
    ]
    if not notes and not failed:
        return None
    return tag(
        "div", [tag("p", said, class_="bad") for said in failed], [tag("p", note) for note in notes], class_="notes"
    )


def render_report(run: RunData) -> str:
    """The whole page as text."""
    sections = [
        joined([tag("h2", title, id=name), tag("p", lead, class_="lead") if lead else None, section(run)])
        for name, title, lead, section in _SECTIONS
    ]
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", f"{run.name} · postrl"),
            tag("style", Html(STYLE)),
        ),
        tag(
            "body",
            tag(
                "main",
                tag("header", tag("h1", run.name), _status(run), tag("div", _facts(run), class_="facts")),
                tag("nav", [tag("a", title, href=f"#{name}") for name, title, _, _ in _SECTIONS]),
                _notes(run),
                headline(run),
                sections,
                tag("footer", "Written by postrl. Self-contained: no script, nothing loaded."),
            ),
        ),
        lang="en",
    )
    return "<!doctype html>\n" + page + "\n"


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into the run directory and returns its path; what is missing there is said in the report.

    Raises FileNotFoundError when there is no such directory.
    """
    run = load_run(Path(run_dir))
    path = Path(run_dir) / "report.html"
    partial = path.with_name(".report.html.partial")
    partial.write_text(render_report(run), encoding="utf-8")
    partial.replace(path)
    return path
