"""Metrics: one JSON line a step, always; wandb mirrors them under the same flat, dotted names.

    {"phase": "rl", "step": 3, "reward.mean": 0.41, "success.shell": 0.38, "seconds.rollout": 9.7, ...}

Each (phase, step) stands in the file once, after any number of kills and resumes. A value that isn't finite is written
as a string, so that the evidence is on disk, and then raised: a run must not go on from it.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

_NAME = re.compile(r"[a-z0-9_]+(\.[A-Za-z0-9_:@-]+)*")


class NonFiniteMetric(ValueError):
    """A metric is NaN or infinite. Its line is in the file, the value as a string."""


class MetricsLog:
    """Appends to `metrics.jsonl`; may be called from any thread.

    What a killed run left is read first: a torn last line is dropped; `rewind` drops the steps that will be repeated.
    """

    def __init__(self, path: str | os.PathLike[str], mirror: WandbMirror | None = None):
        self._path = Path(path)
        self._mirror = mirror
        self._mutex = threading.Lock()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = self._path.read_text() if self._path.exists() else ""
        rows = parse_lines(text, str(self._path))
        self._seen = {(row["phase"], row["step"]) for row in rows}
        if text and not text.endswith("\n"):
            self._rewrite(rows)

    def log(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Writes one line; on return it is on disk.

        Raises ValueError on a name that isn't flat and dotted, or when this (phase, step) is already there;
        `NonFiniteMetric` when a value is NaN or infinite, after the line has been written.
        """
        row: dict[str, Any] = {"phase": phase, "step": int(step)}
        broken = []
        for name, value in values.items():
            if not _NAME.fullmatch(name) or name in row:
                raise ValueError(
                    f"metric {name!r}: expected a flat, dotted name such as reward.mean, and not phase or step"
                )
            number = float(value)
            if not math.isfinite(number):
                broken.append(name)
            row[name] = number if math.isfinite(number) else str(number)
        with self._mutex:
            if (phase, step) in self._seen:
                raise ValueError(
                    f"step {step} of {phase} is already in {self._path}; after a resume call rewind(phase, last_step)"
                )
            with self._path.open("a") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._seen.add((phase, step))
        if broken:
            said = ", ".join(f"{name} is {row[name]}" for name in broken)
            raise NonFiniteMetric(f"step {step} of {phase}: {said}; the line is in {self._path}")
        if self._mirror is not None:
            self._mirror.log(row)

    def rewind(self, phase: str, last_step: int | None) -> int:
        """Drops the lines of `phase` after `last_step` (None: all of them) and returns how many."""
        with self._mutex:
            if not self._path.exists():
                return 0
            rows = parse_lines(self._path.read_text(), str(self._path))
            kept = [
                row for row in rows if row["phase"] != phase or (last_step is not None and row["step"] <= last_step)
            ]
            if len(kept) < len(rows):
                self._rewrite(kept)
                self._seen = {(row["phase"], row["step"]) for row in kept}
            return len(rows) - len(kept)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        partial = self._path.with_name(f".{self._path.name}.partial")
        with partial.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)


def parse_lines(text: str, name: str) -> list[dict[str, Any]]:
    """The rows of a metrics file. A last line without its newline is torn (the run was killed) and left out.

    Raises ValueError when another line isn't a metrics row: somebody else wrote to the file.
    """
    rows = []
    lines = text.split("\n")
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if not isinstance(row, dict) or not {"phase", "step"} <= row.keys():
            raise ValueError(f"line {number} of {name} is not a row of metrics: {line[:80]!r}")
        rows.append(row)
    return rows


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows of a `metrics.jsonl`, also of a run that is still writing it. Values that aren't finite are strings."""
    return parse_lines(Path(path).read_text(), str(path))


# ---------------------------------------------------------------------------------------------------------- wandb


class WandbMirror:
    """Sends rows of metrics to a wandb run. A failure is said in one line and ends the mirroring, not the run."""

    def __init__(self, run: Run, say: Callable[[str], None]):
        self._run: Run | None = run
        self._say = say

    def log(self, row: Mapping[str, Any]) -> None:
        import wandb

        if self._run is None:
            return
        try:
            self._run.log(dict(row))
        except (wandb.Error, OSError) as error:
            self._run = None
            self._say(f"wandb: stopped mirroring ({error}); metrics.jsonl goes on")

    def close(self, timeout_s: float = 60.0) -> None:
        """Ends the wandb run. Waits for its upload for `timeout_s` at most, and says so when that wasn't enough."""
        run, self._run = self._run, None
        if run is None:
            return
        # finish() blocks until everything is uploaded, forever without a network.
        thread = threading.Thread(target=run.finish, daemon=True, name="wandb-finish")
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            self._say(
                f"wandb: upload not finished after {timeout_s:g} s; `wandb sync` on the run's folder completes it"
            )


def open_wandb(
    run_dir: str | os.PathLike[str],
    *,
    project: str,
    name: str,
    config: Mapping[str, Any],
    say: Callable[[str], None] = print,
) -> WandbMirror | None:
    """Starts a wandb run that mirrors the metrics, and says in one line what it does.

    Online when `WANDB_API_KEY` is set, else offline below `run_dir`; `WANDB_MODE` (online, offline, disabled) decides
    otherwise. A resumed run continues its wandb run, except inside a sweep, whose agent names the run. None: disabled,
    or wandb could not start; a training run never fails because of it.
    """
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    if mode == "disabled":
        say("wandb: disabled by WANDB_MODE")
        return None
    # Weave would greet every run because a package named `verifiers` is imported; ours is not the one it knows.
    os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
    # Imported here: it costs most of a second, and a worker or a notebook that only reads metrics doesn't need it.
    import wandb

    run_dir = Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    in_sweep = "WANDB_SWEEP_ID" in os.environ or "WANDB_RUN_ID" in os.environ
    try:
        run = wandb.init(
            project=project,
            name=name,
            config=dict(config),
            dir=run_dir,
            id=None if in_sweep else _wandb_id(run_dir),
            resume="allow" if mode == "online" else None,
            mode="online" if mode == "online" else "offline",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        # Phases count their steps each from 0, so that wandb's own counter, which may only grow, can't be the x axis.
        run.define_metric("*", step_metric="step")
    except (wandb.Error, OSError) as error:
        say(f"wandb: could not start ({error}); metrics go to metrics.jsonl only")
        return None
    if mode == "online":
        say(f"wandb: mirroring to {run.url}")
    else:
        say(f"wandb: offline (no WANDB_API_KEY); `wandb sync {Path(run.dir).parent}` uploads the run later")
    return WandbMirror(run, say)


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / "wandb-id.txt"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12] + "\n")
    return path.read_text().strip()
