"""The shape that the measuring scripts share: sides in turns, medians and spread, a table, and rows of JSON.

A script makes a `Row` for each figure that an issue or the README names and returns `finish(rows, options)` as its
exit status: 0 when it could measure, whatever the values; under `--strict` 1 when a goal is missed. A comparison runs
its sides alternately in one process (A B A B ...), after a warm-up, so that what else the machine does meets both
alike; figures are medians over rounds, ratios are formed within a round.

The JSON is a list of objects with the keys `name, value, unit, goal, met, how`; `goal` and `met` are null where none
is set.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Options:
    """Options of every measuring script."""

    quick: bool = False
    """Small sizes: a smoke run of under two minutes. Its figures mean little."""
    json: Path | None = None
    """Write the rows to this file."""
    strict: bool = False
    """Exit with 1 when a goal is missed."""
    num_threads: int = 2
    """CPUs that the whole process may use."""


@dataclass(frozen=True)
class Row:
    """One figure: what was measured, its goal, and how it came about."""

    name: str
    value: float
    unit: str
    how: str
    goal: float | None = None
    at_most: bool = False
    """The goal is an upper bound; otherwise a lower one."""

    @property
    def met(self) -> bool | None:
        """None: there is no goal. A value that is not a number meets none."""
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def to_json(self) -> dict[str, Any]:
        names = ("name", "value", "unit", "goal", "met", "how")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some values."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def spread(values: Sequence[float]) -> Spread:
    """ValueError when there is nothing to summarise."""
    if not values:
        raise ValueError("no value was measured; a spread needs at least one")
    return Spread(statistics.median(values), min(values), max(values))


Side = Callable[[int], Mapping[str, float]]
"""One side of a comparison: round number -> seconds by stage. Rounds count from 0, the warm-up's included."""

Samples = dict[str, dict[str, list[float]]]
"""Side -> stage -> seconds, one a measured round."""


def alternate(
    sides: Mapping[str, Side], *, num_rounds: int, num_warmup: int = 1, say: Callable[[str], None] = print
) -> Samples:
    """Runs the sides in turns and returns the seconds of the measured rounds.

    `say` hears of every run. ValueError for less than one measured round.
    """
    if num_rounds < 1:
        raise ValueError(f"num_rounds is {num_rounds}; at least one round must be measured")
    samples: Samples = {name: {} for name in sides}
    for k in range(num_warmup + num_rounds):
        for name, run in sides.items():
            seconds = run(k)
            stages = ", ".join(f"{stage} {s:.2f} s" for stage, s in seconds.items())
            say(f"{'warm-up' if k < num_warmup else f'round {k - num_warmup + 1}/{num_rounds}'}  {name}: {stages}")
            if k >= num_warmup:
                for stage, s in seconds.items():
                    samples[name].setdefault(stage, []).append(s)
    return samples


def speedup(ours_s: Sequence[float], theirs_s: Sequence[float]) -> Spread:
    """How many times faster ours was, formed round by round: a slow spell of the machine then cancels."""
    return spread([theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True)])


def use_cpus(num: int) -> None:
    """Confines the process to `num` of its CPUs. Call it before jax or torch is imported: both size their pools by it.

    ValueError when there are fewer.
    """
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= num <= len(available):
        raise ValueError(f"num_threads is {num}; this process may use 1 to {len(available)} CPUs")
    os.sched_setaffinity(0, set(available[:num]))
    os.environ["OMP_NUM_THREADS"] = str(num)


def finish(title: str, rows: Sequence[Row], options: Options) -> int:
    """Prints the table, writes the JSON file, and returns the exit status."""
    table = Table(title=title, title_justify="left")
    for heading, justify in (
        ("figure", "left"),
        ("value", "right"),
        ("unit", "left"),
        ("goal", "right"),
        ("how", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")  # pyright: ignore[reportArgumentType]
    for row in rows:
        goal = (
            "" if row.goal is None else f"{'<=' if row.at_most else '>='} {row.goal:g} {'met' if row.met else 'MISSED'}"
        )
        table.add_row(row.name, f"{row.value:.4g}", row.unit, goal, row.how)
    Console().print(table)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([row.to_json() for row in rows], indent=1) + "\n")
    return 1 if options.strict and any(row.met is False for row in rows) else 0
