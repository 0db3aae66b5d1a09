"""kill -9 at ten random points, the same command again each time: the result is bit for bit an uninterrupted run's."""

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from postrl.policy.model import Layers, Params
from postrl.records import read_trajectories
from postrl.rollout.engine import tree_digest
from postrl.scheduler.journal import Journal
from tests.run import killed_run

REPOSITORY = Path(__file__).parents[2]
NUM_KILLS = 10


@pytest.fixture(scope="module")
def start(toy_run, tmp_path_factory):
    """Starts the short run in a directory; returns its process."""
    scratch = tmp_path_factory.mktemp("killed")
    killed_run.save_params(scratch / "params.npz", cold_started(toy_run))
    environment = {
        **os.environ,
        # Only the starts get shorter: code from the cache is the code that was compiled.
        "JAX_COMPILATION_CACHE_DIR": str(scratch / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(runs_dir: Path) -> subprocess.Popen:
        log = (scratch / f"{runs_dir.name}.log").open("ab")
        with log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.run.killed_run", runs_dir, scratch / "params.npz"],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def finish(runs_dir: Path) -> Path:
        assert start(runs_dir).wait(timeout=600) == 0, (scratch / f"{runs_dir.name}.log").read_text()[-4_000:]
        return runs_dir / "killed"

    start.finish = finish
    return start


@pytest.fixture(scope="module")
def whole_run(start, tmp_path_factory):
    return start.finish(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def killed_runs(start, whole_run, tmp_path_factory):
    """The directory of the run that was killed ten times, and the number of episodes on record at each kill.

    A kill waits for its share of the episodes to be on record, then for a random moment: so the ten spread over all phases
    on a machine of any speed, and fall into compilation, updates, checkpoints and the next start too.
    """
    runs_dir = tmp_path_factory.mktemp("runs") / "killed"
    rng = random.Random(0)
    num_episodes = num_outcomes(whole_run)
    kills = []
    for k in range(NUM_KILLS):
        target = int((k + rng.random()) * (num_episodes - 2) / NUM_KILLS)
        process = start(runs_dir)
        while num_outcomes(runs_dir / "killed") < target and process.poll() is None:
            time.sleep(0.01)
        delay_s = rng.uniform(0, 0.5)
        try:
            process.wait(timeout=delay_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        kills.append((num_outcomes(runs_dir / "killed"), process.returncode))
    return start.finish(runs_dir), kills


def cold_started(toy_run: Path) -> Params:
    """The toy's parameters after its cold start: they solve some tasks and not others."""
    saved = restored(toy_run, "0")["trainable"]
    return Params(embed=saved["embed"], layers=Layers(**saved["layers"]), final_norm=saved["final_norm"])


def restored(run_dir: Path, checkpoint: str):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(run_dir.resolve() / "checkpoints" / checkpoint / "default")


def num_outcomes(run_dir: Path) -> int:
    """Episodes on record, read while the run writes."""
    path = run_dir / "journal.db"
    if not path.exists():
        return 0
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute("SELECT COUNT(*) FROM outcomes").fetchone()[0]
    except sqlite3.OperationalError:  # the schema is not there yet
        return 0
    finally:
        connection.close()


def metrics(run_dir: Path) -> list[dict]:
    """Every line, without what depends on the clock or on how often the run was started."""
    measured = ("seconds.", "engine.", "tokens_per_s")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows.sort(key=lambda row: (row["phase"], row["step"]))
    return [{name: v for name, v in row.items() if not name.startswith(measured)} for row in rows]


def episodes(run_dir: Path) -> list[dict]:
    columns = ["phase", "step", "group", "member", "task_id", "reward", "token_T", "logprob_T", "version_T"]
    return sorted(
        read_trajectories(run_dir / "trajectories", columns=columns),
        key=lambda row: (row["phase"], row["step"], row["group"], row["member"]),
    )


def test_it_was_killed_in_the_middle(killed_runs, whole_run):
    _, kills = killed_runs
    at, codes = zip(*kills, strict=True)
    assert codes == (-9,) * NUM_KILLS
    assert list(at) == sorted(at)
    # Two kills may find the same number on record (both during an update, say); the ten must still spread over the run.
    fifths = {5 * num // (num_outcomes(whole_run) + 1) for num in at}
    assert len(fifths) >= 4, "the kills fell together"
    assert {0, 4} <= fifths


def test_the_final_adapter_is_the_same_bit_for_bit(killed_runs, whole_run):
    killed, _ = killed_runs
    first, second = (restored(path, str(killed_run.NUM_STEPS)) for path in (whole_run, killed))
    assert tree_digest(first["trainable"]) == tree_digest(second["trainable"])
    assert tree_digest(first["opt_state"]) == tree_digest(second["opt_state"])
    assert tree_digest(restored(whole_run, "0")["trainable"]) != tree_digest(first["trainable"]), "nothing was learned"


def test_every_episode_is_the_same(killed_runs, whole_run):
    def comparable(row: dict) -> dict:
        # Bytes: a demonstration's log-probabilities are NaN, which equals nothing.
        return {name: v.tobytes() if isinstance(v, np.ndarray) else v for name, v in row.items()}

    for ours, theirs in zip(episodes(killed_runs[0]), episodes(whole_run), strict=True):
        assert comparable(ours) == comparable(theirs)


def test_every_metric_is_there_once_and_the_same(killed_runs, whole_run):
    assert metrics(killed_runs[0]) == metrics(whole_run)


def test_every_prompt_counts_once(killed_runs, whole_run):
    with Journal.open(killed_runs[0] / "journal.db", read_only=True) as journal:
        counts = journal.audit_counts()
    with Journal.open(whole_run / "journal.db", read_only=True) as journal:
        expected = journal.audit_counts()
    assert counts.problems() == ()
    assert {n: p.num_counted for n, p in counts.phases.items()} == {
        n: p.num_prompts for n, p in expected.phases.items()
    }
    assert counts.num_faults == 0


def test_the_summary_is_the_same(killed_runs, whole_run):
    timed = {"wall_s", "phases_s", "sandbox_s"}
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (killed_runs[0], whole_run))
    assert {k: v for k, v in ours.items() if k not in timed} == {k: v for k, v in theirs.items() if k not in timed}
    assert ours["audit"] == "passed"
