"""The toy, end to end: it reaches the reward that its description states, and leaves the run directory that is promised."""

import dataclasses
import json

import jax
import pytest

from experiments import toy
from postrl.config import RunConfig
from postrl.records import read_trajectories
from postrl.run_state import open_run
from postrl.scheduler.journal import Journal


@pytest.fixture(scope="module")
def summary(toy_run):
    return json.loads((toy_run / "summary.json").read_text())


def test_rl_lifts_held_out_success_as_stated(summary):
    success = {stage: summary["overall"][stage]["success"] for stage in ("base", "cold_start", "rl")}
    assert success["base"] == 0
    assert success["rl"] >= 0.85, success
    assert success["rl"] - success["cold_start"] >= 0.3, success


def test_the_summary_has_its_shape(summary):
    assert summary.keys() >= {
        "domains", "overall", "wall_s", "num_policy_tokens", "num_tool_calls", "num_faults", "audit"
    }  # fmt: skip
    assert summary["audit"] == "passed"
    assert summary["num_faults"] == 0
    assert summary["wall_s"] > 0
    # Loading jax alone takes more than 100 MB; the run was this process or a child of it.
    assert 100 < summary["peak_memory_mb"] < 24_000
    assert summary["domains"].keys() == {"toy"}
    for stages in (summary["domains"]["toy"], summary["overall"]):
        for stage in ("base", "cold_start", "rl"):
            low, high = stages[stage]["ci"]
            assert 0 <= low <= stages[stage]["success"] <= high <= 1
            assert stages[stage]["num_tasks"] == toy.config().domains["toy"].num_heldout


def test_the_summary_counts_what_the_trajectories_hold(toy_run, summary):
    rows = read_trajectories(
        toy_run / "trajectories", columns=["phase", "num_policy_tokens", "num_tool_calls", "outcome"]
    )
    assert summary["num_policy_tokens"] == sum(r["num_policy_tokens"] for r in rows if r["phase"] != "cold_start")
    assert summary["num_tool_calls"] == sum(r["num_tool_calls"] for r in rows)
    assert {r["outcome"] for r in rows} == {"scored"}


def test_a_steps_stages_do_not_overlap(toy_run, summary):
    """The report stacks them: their sum is no more than the phase took."""
    lines = [json.loads(line) for line in (toy_run / "metrics.jsonl").read_text().splitlines()]
    stages = [
        {name: value for name, value in line.items() if name.startswith("seconds.")}
        for line in lines
        if line["phase"] == "rl"
    ]
    assert set().union(*stages) == {"seconds.rollout", "seconds.update", "seconds.publish"}
    assert sum(sum(stage.values()) for stage in stages) <= summary["phases_s"]["rl"]


def test_every_prompt_counts_once(toy_run):
    config = toy.config()
    with Journal.open(toy_run / "journal.db", read_only=True) as journal:
        counts = journal.audit_counts()
    assert counts.problems() == ()
    expected = {
        "evaluate:preflight": 2 * len(toy.KINDS),
        "evaluate:base": config.domains["toy"].num_heldout,
        "cold_start": config.domains["toy"].num_demonstrations,
        "evaluate:cold_start": config.domains["toy"].num_heldout,
        "rl": config.rl.num_steps * config.domains["toy"].groups_per_step,
        "evaluate:rl": config.domains["toy"].num_heldout,
    }
    # Preflight and evaluation replay tasks at several steps; everything drawn was counted, and nothing is open.
    assert {name: phase.num_prompts for name, phase in counts.phases.items()} == expected
    assert {name: phase.num_counted for name, phase in counts.phases.items()} == expected
    assert all(phase.num_open == 0 for phase in counts.phases.values())


def test_the_audit_holds_its_evidence(toy_run):
    audit = json.loads((toy_run / "audit.json").read_text())
    assert audit["status"] == "passed"
    checks = {check["name"]: check for check in audit["checks"]}
    assert all(check["status"] == "passed" and check["sentence"] for check in audit["checks"])
    assert checks.keys() >= {
        "reference scores 1", "no-op scores 0", "held-out tasks are held out", "tokenizer round trip",
        "sampling does not depend on neighbours", "sampler weights = learner weights", "demonstrations score 1",
        "faults within bound", "rewards are not constant", "staleness within bound", "sampler and learner agree",
        "the update changes the policy", "each prompt counted once",
    }  # fmt: skip
    assert checks["sampler and learner agree"]["evidence"]["max_gap"] <= 1e-4


def test_the_run_directory_is_complete(toy_run):
    config = toy.config()
    assert {"config.json", "journal.db", "trajectories", "metrics.jsonl", "checkpoints", "aot", "audit.json"} <= {
        path.name for path in toy_run.iterdir()
    }
    assert "<html" in (toy_run / "report.html").read_text()
    steps = [json.loads(line) for line in (toy_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if row["phase"] == "rl"] == list(range(config.rl.num_steps))
    assert (toy_run / "checkpoints" / str(config.rl.num_steps)).is_dir()


def test_the_policy_has_fewer_than_a_million_parameters():
    assert sum(leaf.size for leaf in jax.tree.leaves(toy.random_base().params)) < 1_000_000


def test_another_config_does_not_resume(small_config):
    def opened(config: RunConfig):
        with open_run(config, toy.parts()):
            pass

    opened(small_config)
    opened(dataclasses.replace(small_config, wandb_project="elsewhere"))  # decides nothing about the result
    other = dataclasses.replace(small_config, seed=1)
    with pytest.raises(ValueError, match=rf"another config \(fingerprint \w+, now {other.fingerprint}\).*another name"):
        opened(other)
