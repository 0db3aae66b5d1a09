"""Runs a wandb sweep file on this machine, without a wandb server, one run after another.

    python scripts/sweep.py experiments/sweeps/quickstart_lr.yaml
    python scripts/sweep.py FILE --json rows.json          # the results as rows, too
    python scripts/sweep.py FILE -- --rl.num_steps=3       # what follows -- goes to every run

The same file works with `wandb sweep FILE`. Read here: `program`, `method` (grid or random), `run_cap`, and
`parameters` with `value`, `values` or `min` and `max`, under flat dotted names. `command` belongs to wandb's agent and
is not read: a run here is `program --name=<sweep>/<its values> --<parameter>=<value> ...`. A run that is finished is
not repeated, and one that was interrupted resumes, because its name says its values. Exits with 1 when a run failed;
the others still run.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tyro
import yaml
from measure import Row
from rich.console import Console
from rich.table import Table

Value = bool | int | float | str
Point = Mapping[str, Value]
"""Parameter -> value: one run of the sweep."""


@dataclass(frozen=True)
class Sweep:
    name: str
    program: str
    points: tuple[Point, ...]


def load_sweep(path: Path, *, num_runs: int | None = None, seed: int = 0) -> Sweep:
    """The sweep that a wandb file describes; `num_runs` overrides its `run_cap`, `seed` decides random values.

    ValueError when the file asks for what needs wandb's server, or describes no runs.
    """
    spec = yaml.safe_load(path.read_text())
    if not isinstance(spec, dict) or not {"program", "method", "parameters"} <= spec.keys():
        raise ValueError(f"{path}: expected the keys program, method and parameters")
    parameters, cap = spec["parameters"], num_runs or spec.get("run_cap")
    match spec["method"]:
        case "grid":
            points = itertools.islice(grid(parameters), cap)
        case "random" if cap:
            points = itertools.islice(draws(parameters, random.Random(seed)), cap)
        case "random":
            raise ValueError(f"{path}: a random sweep has no end of its own; give it run_cap, or --num-runs here")
        case method:
            raise ValueError(f"{path}: method {method!r} needs wandb's server; here: grid, random")
    sweep = Sweep(spec.get("name") or path.stem, spec["program"], tuple(points))
    if not sweep.points:
        raise ValueError(f"{path}: some parameter has no values, so there is nothing to run")
    return sweep


def grid(parameters: Mapping[str, Mapping[str, Any]]) -> Iterator[Point]:
    """Every combination; the last parameter varies fastest."""
    options = [_options(name, spec) for name, spec in parameters.items()]
    return (dict(zip(parameters, values, strict=True)) for values in itertools.product(*options))


def draws(parameters: Mapping[str, Mapping[str, Any]], rng: random.Random) -> Iterator[Point]:
    """Endlessly many independent draws."""
    draw_of = {name: _distribution(name, spec) for name, spec in parameters.items()}
    while True:
        yield {name: draw(rng) for name, draw in draw_of.items()}


def _options(name: str, spec: Mapping[str, Any]) -> list[Value]:
    if "values" in spec:
        return list(spec["values"])
    if "value" in spec:
        return [spec["value"]]
    raise ValueError(f"parameter {name}: a grid needs value or values, not {sorted(spec)}")


def _distribution(name: str, spec: Mapping[str, Any]) -> Callable[[random.Random], Value]:
    """wandb's rules: `values` are equally likely; between `min` and `max`, integers are whole and others real."""
    if not {"min", "max"} <= spec.keys():
        options = _options(name, spec)
        return lambda rng: rng.choice(options)
    low, high = spec["min"], spec["max"]
    if not (isinstance(low, int | float) and isinstance(high, int | float) and low <= high):
        raise ValueError(
            f"parameter {name}: min {low!r} and max {high!r} are no range (YAML reads 1e-5 as text: 1.0e-5)"
        )
    whole = isinstance(low, int) and isinstance(high, int)
    match spec.get("distribution", "int_uniform" if whole else "uniform"):
        case "int_uniform":
            return lambda rng: rng.randint(int(low), int(high))
        case "uniform":
            return lambda rng: rng.uniform(low, high)
        case "log_uniform_values":
            return lambda rng: math.exp(rng.uniform(math.log(low), math.log(high)))
        case other:
            known = "uniform, int_uniform, log_uniform_values"
            raise ValueError(f"parameter {name}: distribution {other!r} is not supported here; supported: {known}")


def run_name(sweep: Sweep, point: Point) -> str:
    """`quickstart_lr/rl.learning_rate=0.0001,seed=0`: the same values, the same run."""
    return f"{sweep.name}/" + ",".join(f"{name}={quote(str(value), safe='')}" for name, value in point.items())


def command(sweep: Sweep, point: Point, runs_dir: Path, extra: Sequence[str]) -> list[str]:
    flags = [f"--{name}={value}" for name, value in point.items()]
    return [
        sys.executable, sweep.program, f"--name={run_name(sweep, point)}", f"--runs_dir={runs_dir}", *flags, *extra
    ]  # fmt: skip


def run_all(sweep: Sweep, runs_dir: Path, extra: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Run name -> its `summary.json`, or None where it failed."""
    summaries: dict[str, dict[str, Any] | None] = {}
    for number, point in enumerate(sweep.points, 1):
        name = run_name(sweep, point)
        path = runs_dir / name / "summary.json"
        print(f"run {number} of {len(sweep.points)}: {name}", flush=True)
        status = 0 if path.exists() else subprocess.run(command(sweep, point, runs_dir, extra)).returncode
        summaries[name] = json.loads(path.read_text()) if status == 0 and path.exists() else None
        if summaries[name] is None:
            print(f"run {number} failed: exit status {status}, {'no ' if not path.exists() else ''}{path}", flush=True)
    return summaries


def rows(summaries: Mapping[str, dict[str, Any] | None]) -> list[Row]:
    """Two figures of each finished run: held-out success after RL, and the gain over the cold start."""
    result = []
    for name, summary in summaries.items():
        if summary is not None:
            rl, gain = summary["overall"]["rl"], summary["gain"]
            how = f"{rl['num_tasks']} held-out tasks, 95 % interval"
            result += [
                Row(f"{name}: success", rl["success"], "share", f"{how} [{rl['ci'][0]:.2f}, {rl['ci'][1]:.2f}]"),
                Row(f"{name}: gain", gain["points"], "points", f"{how} [{gain['ci'][0]:.1f}, {gain['ci'][1]:.1f}]"),
            ]
    return result


def table(sweep: Sweep, summaries: Mapping[str, dict[str, Any] | None]) -> Table:
    """One line a run, the best first, failed ones last."""
    result = Table(title=f"{sweep.name}: success on held-out tasks", title_justify="left")
    for heading in (*sweep.points[0], "cold start", "RL", "gain, 95 % interval", "faults", "minutes"):
        result.add_column(heading, justify="right")

    def success(point: Point) -> float:
        summary = summaries[run_name(sweep, point)]
        return summary["overall"]["rl"]["success"] if summary else -1.0

    for point in sorted(sweep.points, key=success, reverse=True):
        values = [f"{value:g}" if isinstance(value, float) else str(value) for value in point.values()]
        summary = summaries[run_name(sweep, point)]
        if summary is None:
            result.add_row(*values, "failed")
            continue
        overall, gain = summary["overall"], summary["gain"]
        result.add_row(
            *values,
            f"{overall['cold_start']['success']:.0%}",
            f"{overall['rl']['success']:.0%}",
            f"{gain['points']:+.1f} [{gain['ci'][0]:.1f}, {gain['ci'][1]:.1f}]",
            str(summary["num_faults"]),
            f"{summary['wall_s'] / 60:.1f}",
        )
    return result


@dataclass(frozen=True)
class Options:
    file: tyro.conf.Positional[Path]
    """wandb sweep file."""
    json: Path | None = None
    """Write the figures to this file."""
    num_runs: int | None = None
    """At most so many runs; by default the file's run_cap."""
    seed: int = 0
    """Of a random sweep's values."""
    runs_dir: Path = Path("runs")
    dry_run: bool = False
    """Print the commands only."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    end = given.index("--") if "--" in given else len(given)
    options, extra = tyro.cli(Options, args=given[:end]), given[end + 1 :]
    sweep = load_sweep(options.file, num_runs=options.num_runs, seed=options.seed)
    if options.dry_run:
        for point in sweep.points:
            print(*command(sweep, point, options.runs_dir, extra))
        return 0
    summaries = run_all(sweep, options.runs_dir, extra)
    Console().print(table(sweep, summaries))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([row.to_json() for row in rows(summaries)], indent=1) + "\n")
    return 1 if None in summaries.values() else 0


if __name__ == "__main__":
    sys.exit(main())
