"""metrics.jsonl holds each step once, whatever killed the run; wandb gets the same rows and can't hurt."""

import json

import pytest

from postrl.metrics import MetricsLog, NonFiniteMetric, WandbMirror, open_wandb, read_metrics


def test_lines_are_what_was_logged(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log("rl", 0, {"reward.mean": 0.25, "success.shell": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"phase": "rl", "step": 0, "reward.mean": 0.25, "success.shell": 1.0}\n'
    )


def test_each_step_once(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log("rl", 0, {"loss": 1.0})
    log.log("cold_start", 0, {"loss": 2.0})
    with pytest.raises(ValueError, match="step 0 of rl is already in"):
        log.log("rl", 0, {"loss": 3.0})
    with pytest.raises(ValueError, match="step 0 of rl is already in"):
        MetricsLog(tmp_path / "metrics.jsonl").log("rl", 0, {"loss": 3.0})


def test_rewind_drops_what_will_be_repeated(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(4):
        log.log("rl", step, {"loss": float(step)})
        log.log("cold_start", step, {"loss": float(step)})
    resumed = MetricsLog(tmp_path / "metrics.jsonl")
    assert resumed.rewind("rl", 1) == 2
    assert resumed.rewind("rl", 1) == 0
    resumed.log("rl", 2, {"loss": 20.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows if row["phase"] == "rl"] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert [row["step"] for row in rows if row["phase"] == "cold_start"] == [0, 1, 2, 3]
    assert resumed.rewind("cold_start", None) == 4


def test_torn_last_line_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"phase": "rl", "step": 0, "loss": 1.0}\n{"phase": "rl", "st')
    assert len(read_metrics(path)) == 1
    log = MetricsLog(path)
    log.log("rl", 1, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_foreign_line_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("hello\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a row of metrics: 'hello'"):
        MetricsLog(path)


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_non_finite_is_written_and_raised(tmp_path, value, text):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(NonFiniteMetric, match=f"step 3 of rl: grad_norm is {text}; the line is in"):
        log.log("rl", 3, {"loss": 1.0, "grad_norm": value})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "phase": "rl",
        "step": 3,
        "loss": 1.0,
        "grad_norm": text,
    }


@pytest.mark.parametrize("name", ["step", "phase", "Reward", "a b", "a..b", ""])
def test_names_are_flat_and_dotted(tmp_path, name):
    with pytest.raises(ValueError, match="expected a flat, dotted name"):
        MetricsLog(tmp_path / "metrics.jsonl").log("rl", 0, {name: 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


class BrokenRun:
    def log(self, row):
        raise BrokenPipeError("wandb-core is gone")


def test_a_broken_mirror_is_said_once_and_the_run_goes_on(tmp_path):
    said = []
    log = MetricsLog(tmp_path / "metrics.jsonl", WandbMirror(BrokenRun(), said.append))  # pyright: ignore
    log.log("rl", 0, {"loss": 1.0})
    log.log("rl", 1, {"loss": 1.0})
    assert said == ["wandb: stopped mirroring (wandb-core is gone); metrics.jsonl goes on"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_wandb_offline_for_real(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SWEEP_ID", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    said = []
    mirror = open_wandb(tmp_path, project="postrl", name="test", config={"lr": 1e-4}, say=said.append)
    assert mirror is not None
    log = MetricsLog(tmp_path / "metrics.jsonl", mirror)
    log.log("cold_start", 7, {"loss": 2.0})
    log.log("rl", 0, {"loss": 1.0, "reward.mean": 0.5})
    summary = dict(mirror._run.summary)
    assert {name: summary[name] for name in ("phase", "step", "loss", "reward.mean")} == {
        "phase": "rl",
        "step": 0,
        "loss": 1.0,
        "reward.mean": 0.5,
    }
    mirror.close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert said == [f"wandb: offline (no WANDB_API_KEY); `wandb sync {folder}` uploads the run later"]
    assert folder.name.endswith((tmp_path / "wandb-id.txt").read_text().strip())
    assert list(folder.glob("*.wandb"))


def test_wandb_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    said = []
    assert open_wandb(tmp_path, project="p", name="n", config={}, say=said.append) is None
    assert said == ["wandb: disabled by WANDB_MODE"]


def test_wandb_that_cannot_start_does_not_stop_the_run(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError("no route to host")

    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(wandb, "init", refuse)
    said = []
    assert open_wandb(tmp_path, project="p", name="n", config={}, say=said.append) is None
    assert said == ["wandb: could not start (no route to host); metrics go to metrics.jsonl only"]
