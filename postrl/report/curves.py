"""How it went: reward, success, loss and speed over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from postrl.report.charts import (
    Series,
    line_chart,
    percent,
    series_color,
    short,
    stacked_bars,
)
from postrl.report.markup import Html, joined, tag
from postrl.report.run_data import (
    RunData,
    metric_columns,
    not_finite,
)


def _figure(title: str, note: str, chart: Html | None) -> Html | None:
    return None if chart is None else tag("figure", tag("figcaption", title, tag("small", note)), chart)


def _by_prefix(columns: Mapping[str, list[float | None]], prefix: str) -> dict[str, list[float | None]]:
    return {name.removeprefix(prefix): values for name, values in columns.items() if name.startswith(prefix)}


_SINGLE = (
    ("Loss", "loss", ""),
    ("Entropy", "entropy", "nats a token"),
    ("Gradient norm", "grad_norm", "before clipping"),
    ("KL to the base", "kl", "nats a token"),
    ("Largest gap of log-probabilities", "logprob_gap.max", "sampler against learner"),
    ("Speed", "tokens_per_s", "policy tokens a second"),
)


def curves(run: RunData) -> Html:
    steps, columns = metric_columns(run, "rl")
    figures: list[Html | None] = []
    if steps:
        mean = Series("reward", steps, columns.pop("reward.mean", [None] * len(steps)), series_color(0))
        figures.append(_figure("Reward", "mean of a step", line_chart("Mean reward by step", [mean], y_range=(0, 1))))
        for title, prefix in (("Success in training", "success."), ("Reward by domain", "reward.")):
            lines = [
                Series(name, steps, values, series_color(index))
                for index, (name, values) in enumerate(_by_prefix(columns, prefix).items())
            ]
            chart = line_chart(title, lines, y_range=(0, 1), y_text=percent if prefix == "success." else short)
            figures.append(_figure(title, "by domain; bold: running mean", chart) if lines else None)
        seconds = {
            name: [value or 0.0 for value in values]
            for name, values in _by_prefix(columns, "seconds.").items()
            if name != "total"
        }
        figures.append(
            _figure("Seconds a step", "by stage; the names carry medians", stacked_bars("Seconds", steps, seconds))
        )
        for title, name, note in _SINGLE:
            line = Series(title.lower(), steps, columns.get(name, [None] * len(steps)), series_color(0))
            figures.append(_figure(title, note, line_chart(title, [line])))
    cold_steps, cold_columns = metric_columns(run, "cold_start")
    if cold_steps and "loss" in cold_columns:
        line = Series("loss", cold_steps, cold_columns["loss"], series_color(1))
        figures.append(_figure("Cold start: loss", "supervised, nats a token", line_chart("Cold start loss", [line])))
    shown = [figure for figure in figures if figure is not None]
    if not shown:
        return tag("p", "No step has been finished, so there is nothing to draw.", class_="muted")
    broken = [f"{name} is {text} in step {step} of {phase}" for phase, step, name, text in not_finite(run)]
    return joined(
        [
            tag("p", "Not finite: " + "; ".join(broken[:8]) + ".", class_="bad") if broken else None,
            tag("div", shown, class_="charts"),
            _others(steps, columns),
        ]
    )


def _others(steps: Sequence[int], columns: Mapping[str, list[float | None]]) -> Html | None:
    """Every other metric of the RL phase, whatever an experiment logged, folded away."""
    drawn = {name for _, name, _ in _SINGLE}
    figures = [
        _figure(name, "", line_chart(name, [Series(name, steps, values, series_color(7))]))
        for name, values in columns.items()
        if name not in drawn and not name.startswith(("success.", "reward.", "seconds."))
    ]
    if not any(figures):
        return None
    return tag("details", tag("summary", "all other metrics"), tag("div", figures, class_="charts"), class_="others")
