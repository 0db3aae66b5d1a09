"""The best and the worst episode of each domain, turn by turn, in the policy's own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from postrl.report.markup import Html, joined, tag
from postrl.report.run_data import RunData, full_rows

MAX_TEXT = 6_000
"""Characters shown of one text."""
_PHASES = {
    "evaluate:rl": "the evaluation after RL",
    "rl": "RL",
    "evaluate:cold_start": "the evaluation after the cold start",
    "cold_start": "the demonstrations of the cold start",
    "evaluate:base": "the evaluation of the base",
}


def best_and_worst(run: RunData) -> tuple[str | None, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """The phase that they come from (the latest that the run has reached) and a pair for each domain.

    Best: highest reward, then the most turns (the richer story), then the latest step. Worst: lowest reward, then the
    latest step, then the most tokens. Episodes whose reward doesn't count are left out.
    """
    present = set(run.episodes["phase"].to_pylist())
    phase = next((phase for phase in _PHASES if phase in present), None)
    if phase is None:
        return None, []
    rows = run.episodes.filter(pc.equal(run.episodes["phase"], phase)).to_pylist()  # pyright: ignore[reportAttributeAccessIssue]
    rows = [row for row in rows if row["reward"] is not None and row["num_turns"]]
    pairs = []
    for domain in sorted({row["domain"] for row in rows}):
        mine = [row for row in rows if row["domain"] == domain]
        best = max(mine, key=lambda row: (row["reward"], row["num_turns"], row["step"], -row["group"], -row["member"]))
        worst = min(mine, key=lambda row: (row["reward"], -row["step"], -row["num_policy_tokens"], row["group"]))
        pairs.append((best, worst))
    return phase, pairs


def episodes(run: RunData) -> Html:
    phase, pairs = best_and_worst(run)
    if phase is None or not pairs:
        return tag("p", "No episode has been judged yet.", class_="muted")
    full = full_rows(run, [row for pair in pairs for row in pair])
    shown = [
        joined([_episode("best", full[2 * index], opened=index == 0), _episode("worst", full[2 * index + 1])])
        for index in range(len(pairs))
    ]
    return joined([tag("p", f"From {_PHASES[phase]}, one pair a domain.", class_="lead"), shown])


def _clip(text: str | None) -> str:
    text = text or ""
    if len(text) <= MAX_TEXT:
        return text
    return text[:MAX_TEXT] + f"\n… {len(text) - MAX_TEXT:,} more characters"


def _said(who: str, text: str | None, *, class_: str = "said", flag: str | None = None) -> Html:
    body = tag("div", tag("pre", _clip(text) or "(nothing)"), tag("p", flag, class_="flag") if flag else None)
    return tag("div", tag("span", who), body, class_=class_)


def _episode(label: str, row: Mapping[str, Any], *, opened: bool = False) -> Html:
    reward = row["reward"]
    turns = "1 turn" if row["num_turns"] == 1 else f"{row['num_turns']} turns"
    sandbox_s = row["sandbox_s"] or 0.0
    facts = f"step {row['step']} · {turns} · {row['num_policy_tokens']} tokens · {sandbox_s:.1f} s in the sandbox"
    summary = tag(
        "summary",
        tag("span", f"{label} · {row['domain']} / {row['kind']}"),
        tag("strong", f"reward {reward:.2f}", class_="good" if row["success"] else "bad" if reward == 0 else "warn"),
        tag("span", facts, class_="facts"),
    )
    body = [_said("task", row["prompt"])]
    for index, turn in enumerate(row["turns"] or ()):
        if index and turn["prompt"]:
            body.append(_said("observation", turn["prompt"]))
        flags = []
        if turn["call_name"] is None:
            flags.append("not a tool call")
        if turn["stop"] != "stop":
            flags.append(f"stopped by {turn['stop']}")
        said = ", ".join(flags) or None
        body.append(_said(f"policy, turn {index + 1}", turn["reply"], class_="said policy", flag=said))
    if row["turns"]:
        body.append(_said("result", row["turns"][-1]["observation"]))
    body.append(_verdict(row))
    attributes = {"open": ""} if opened else {}
    return tag("details", summary, tag("div", body, class_="body"), class_="episode", **attributes)


def _verdict(row: Mapping[str, Any]) -> Html:
    findings: Sequence[Mapping[str, str]] = row["findings"] or ()
    parts = " · ".join(f"{part['name']} {part['value']:.2f}" for part in row["parts"] or ())
    shown = [
        tag("div", row["message"], class_="parts") if row["message"] else None,
        tag("div", parts, class_="parts") if parts else None,
        tag(
            "ul",
            [tag("li", tag("strong", finding["subject"]), ": " + finding["message"]) for finding in findings],
            class_="findings",
        )
        if findings
        else tag("div", "nothing found wrong", class_="parts")
        if row["success"]
        else None,
        tag("div", row["verifier"], class_="parts") if row["verifier"] else None,
    ]
    return tag("div", tag("span", "verdict"), tag("div", shown), class_="said")
