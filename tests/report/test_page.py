"""The whole report, of finished, stopped, empty, damaged and hostile runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from postrl.contracts import Finding, InfraFault, PolicyFault, Scored, Verdict
from postrl.metrics import MetricsLog, NonFiniteMetric
from postrl.records import trajectory_path, write_trajectories
from postrl.report import write_report
from postrl.scheduler.journal import Journal
from tests.report.test_markup import Parsed
from tests.sample_episodes import sample_task, sample_trajectory

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b\x00\u202e\"' & {{x}}"
SHOWN = "</script><script>alert(1)</script><img src=x onerror=alert(1)>␛␀⟨U+202E⟩\"' & {{x}}"


def play(run_dir, journal, phase, step, tasks, solved, *, text="wc -l"):
    rows = []
    for group in journal.draw(phase, step, tasks, group_size=2, run_seed=0):
        for episode in group.episodes:
            success = solved(episode)
            finding = Finding(f"lines {text}", f"off by one {text}")
            verdict = Verdict(
                float(success), success, {"lines": float(success)}, () if success else (finding,), "shell@1"
            )
            trajectory = sample_trajectory(episode.task, episode.seed, text=text)
            rows.append(journal.record(episode, Scored(verdict), trajectory))
    write_trajectories(trajectory_path(run_dir, phase, step), rows)
    journal.commit_step(phase, step)


def tasks_of(split, start=0):
    return [
        sample_task(start + index, domain=domain, kind=kind, split=split)
        for index, (domain, kind) in enumerate([("shell", "count"), ("shell", "sort"), ("filings", "table")])
    ]


@pytest.fixture
def run_dir(tmp_path):
    """A run that was killed after two RL steps: both evaluations before RL are there, nothing after."""
    path = tmp_path / "quickstart"
    log = MetricsLog(path / "metrics.jsonl")
    with Journal.open(path / "journal.db") as journal:
        play(path, journal, "evaluate:base", 0, tasks_of("heldout"), lambda episode: False)
        play(path, journal, "cold_start", 0, tasks_of("train", 100), lambda episode: True)
        play(path, journal, "evaluate:cold_start", 0, tasks_of("heldout"), lambda e: e.task.kind == "count")
        for step in range(2):
            tasks = tasks_of("train", 3 * step)
            play(path, journal, "rl", step, tasks, lambda e: e.task.kind == "count" and e.key.member == 0)
            log.log("rl", step, {"reward.mean": 0.25 + step / 4, "seconds.rollout": 9.0, "clip_fraction": 0.1})
        journal.record_fault(journal.draw("rl", 1, tasks_of("train", 3), group_size=2, run_seed=0)[0].episodes[0].key,
                             0, "sandbox", "bwrap died")  # fmt: skip
    (path / "config.json").write_text(json.dumps({"git_commit": "42b7731deadbeef", "config": {"lr": 2e-5}}))
    return path


def stage(success, num_tasks=60):
    return {"success": success, "ci": [success - 0.05, success + 0.05], "num_tasks": num_tasks}


def finish(path, **audit):
    kinds = {"count": {"base": 0.1, "cold_start": 0.5, "rl": 0.9}, "sort": {"base": 0.0, "cold_start": 0.0, "rl": 0.0}}
    domain = {"base": stage(0.05), "cold_start": stage(0.36), "rl": stage(0.77), "kinds": kinds}
    summary = {
        "domains": {"shell": domain},
        "overall": {"base": stage(0.05, 120), "cold_start": stage(0.36, 120), "rl": stage(0.77, 120)},
        "gain": {"points": 41.0, "ci": [33.0, 49.0]},
        "wall_s": 1318.0,
        "phases_s": {"cold_start": 100.0, "rl": 820.0},
        "num_policy_tokens": 141233,
        "num_tool_calls": 4012,
        "num_faults": 1,
        "sandbox_s": 512.0,
        "audit": "passed",
    }
    (path / "summary.json").write_text(json.dumps(summary))
    check = {
        "name": "base_frozen",
        "status": "passed",
        "sentence": "The base is unchanged.",
        "evidence": {"sha": "77aa"},
    }
    status = audit.get("status", "passed")
    (path / "audit.json").write_text(json.dumps({"status": status, "checks": [check | audit]}))


def text_of(path):
    return Parsed(write_report(path).read_text()).text


def test_finished_run(run_dir):
    finish(run_dir)
    text = text_of(run_dir)
    for part in (
        "Reinforcement learning lifted success by 41 points (95\u00a0% interval 33 to 49) over the cold start "
        "on 120 held-out tasks.",
        "commit 42b7731deadb",
        "21:58 wall time · 141,233 policy tokens · 4,012 tool calls · 512 sandbox seconds · 1 fault",
        "audit passed",
        "1 of 1 checks passed.",
        "One point of held-out success cost 20.0 s of reinforcement learning.",
        "shell / sort: 2 demonstrations, 4 sampled episodes; 0 of them solved, best reward 0.00; most often "
        "“lines wc -l: off by one wc -l” (4 times).",
        "The journal holds each committed prompt exactly once.",
        "shell: sandbox",
        "clip_fraction, step 1: 0.1",
    ):
        assert part in text
    assert "not finished" not in text


def test_a_gain_that_could_be_none_is_called_so(run_dir):
    finish(run_dir)
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["gain"] = {"points": 0.8, "ci": [-9.6, 11.3]}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert (
        "Reinforcement learning made no measurable difference to the cold start, +1 points (95\u00a0% interval -10 to 11) "
        "on 120 held-out tasks."
    ) in text_of(run_dir)


def test_stopped_run_says_so_and_counts_its_own_evaluations(run_dir):
    text = text_of(run_dir)
    assert "not finished" in text
    assert "summary.json is missing: the run hasn't finished, or was stopped." in text
    assert "audit not run" in text
    assert "rl up to step 1. The same command resumes the run from there." in text
    # Held out: 3 tasks, 2 episodes each, and `count` alone is solved: 2 of 6.
    assert "So far the cold start solves 33\u00a0% on 6 held-out tasks." in text


def test_failed_audit_stands_at_the_top(run_dir):
    finish(run_dir, status="failed", sentence="The base changed in step 3.")
    text = text_of(run_dir)
    assert "audit failed" in text
    assert text.index("The audit failed: The base changed in step 3.") < text.index("lifted success")


def test_empty_directory(tmp_path):
    text = text_of(tmp_path)
    for name in ("summary.json", "audit.json", "config.json", "metrics.jsonl", "journal.db"):
        assert f"{name} is missing" in text
    assert "There are no trajectories yet." in text
    assert "No evaluation has been finished" in text
    with pytest.raises(FileNotFoundError, match="no run directory at"):
        write_report(tmp_path / "nothing")


def test_damaged_files_are_named_and_survived(run_dir):
    (run_dir / "summary.json").write_text('{"domains": ')
    (run_dir / "audit.json").write_text("[]")
    (run_dir / "metrics.jsonl").write_text("hello\n")
    (run_dir / "trajectories" / "rl-000001.parquet").write_bytes(b"PAR1")
    for leftover in run_dir.glob("journal.db*"):
        leftover.unlink()
    (run_dir / "journal.db").write_bytes(b"not a database" * 100)
    text = text_of(run_dir)
    for part in (
        "summary.json can't be read",
        "audit.json holds list, not an object.",
        "line 1 of metrics.jsonl is not a row of metrics",
        "rl-000001.parquet can't be read",
        "journal.db can't be read",
    ):
        assert part in text


def test_values_that_are_not_finite_are_named(run_dir):
    with pytest.raises(NonFiniteMetric):
        MetricsLog(run_dir / "metrics.jsonl").log("rl", 2, {"reward.mean": float("nan"), "loss": 1.0})
    assert "Not finite: reward.mean is nan in step 2 of rl." in text_of(run_dir)


def test_hostile_text_stays_text(tmp_path):
    path = tmp_path / "hostile"
    task = sample_task(0, kind=f"kind {HOSTILE}")
    with Journal.open(path / "journal.db") as journal:
        play(
            path,
            journal,
            "evaluate:rl",
            0,
            [type(task)(**{**vars(task), "prompt": HOSTILE})],
            lambda e: False,
            text=HOSTILE,
        )
        for step, outcome in enumerate([InfraFault(f"stage {HOSTILE}", HOSTILE), PolicyFault(HOSTILE)]):
            (group,) = journal.draw("rl", step, [sample_task(step + 1)], group_size=1, run_seed=0)
            journal.record_fault(group.episodes[0].key, 0, HOSTILE, HOSTILE)
            rows = [journal.record(group.episodes[0], outcome, None)]
            write_trajectories(trajectory_path(path, "rl", step), rows)
    (path / "config.json").write_text(json.dumps({"git_commit": HOSTILE, "note": HOSTILE}))
    check = {"name": HOSTILE, "status": "failed", "sentence": HOSTILE, "evidence": {HOSTILE: HOSTILE}, "step": 3}
    (path / "audit.json").write_text(json.dumps({"status": HOSTILE, "checks": [check]}))
    markup = write_report(path).read_text()
    parsed = Parsed(markup)
    names = {name for name, _ in parsed.tags}
    assert not names & {"script", "img", "iframe", "object", "embed", "link", "form", "base"}
    for name, attributes in parsed.tags:
        assert not any(attribute.startswith("on") for attribute in attributes), (name, attributes)
        for reference in ("href", "src"):
            assert (attributes.get(reference) or "#").startswith("#")
    (policy,) = [attributes["content"] for _, attributes in parsed.tags if "http-equiv" in attributes]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    # Shown: prompt, replies of two turns, finding, fault messages, stage, audit, config.
    assert parsed.text.count(SHOWN) >= 10
    assert "\x1b" not in markup
    assert "\u202e" not in markup


def test_report_is_self_contained_and_repeatable(run_dir):
    finish(run_dir)
    first = write_report(run_dir).read_text()
    assert write_report(run_dir).read_text() == first
    assert "http://" not in first.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in first
    assert "url(" not in first


def test_best_and_worst_are_what_they_say(run_dir):
    finish(run_dir)
    shutil.rmtree(run_dir / "trajectories")
    with Journal.open(run_dir / "other.db") as journal:
        play(run_dir, journal, "evaluate:rl", 2, tasks_of("heldout"), lambda e: e.task.kind != "sort")
    text = text_of(run_dir)
    assert "From the evaluation after RL, one pair a domain." in text
    assert "best · shell / countreward 1.00" in text
    assert "worst · shell / sortreward 0.00" in text
    assert "not a tool call, stopped by length" in text


def test_nothing_here_loads_jax():
    modules = ["codec", "intervals", "metrics", "progress", "records", "report", "scheduler.journal"]
    imports = "; ".join(f"import postrl.{name}" for name in modules)
    code = f"import sys; {imports}; assert 'jax' not in sys.modules; assert 'wandb' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_command_line(run_dir):
    command = [sys.executable, "-m", "postrl.report"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*command, str(run_dir)], check=True, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == str(run_dir / "report.html")
    failed = subprocess.run([*command, str(run_dir / "nothing")], cwd=root, capture_output=True, text=True)
    assert (failed.returncode, failed.stderr.strip()) == (1, f"no run directory at {run_dir / 'nothing'}")
