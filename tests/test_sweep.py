"""The local sweep: what wandb's file means, what each run is called and told, and that wandb's agent does so too."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
from pathlib import Path

import pytest
import sweep
import tyro
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from experiments.quickstart import Arguments, config
from postrl.config import RunConfig

QUICKSTART_LR = Path(__file__).parent.parent / "experiments/sweeps/quickstart_lr.yaml"

# A program with an experiment's interface: flags in, a run directory with a summary out. Learning rate 3 fails.
PROGRAM = """
import json, pathlib, sys
flags = dict(arg.lstrip("-").split("=", 1) for arg in sys.argv[1:])
rate = float(flags["rl.learning_rate"])
if rate == 3:
    sys.exit("diverged")
run_dir = pathlib.Path(flags["runs_dir"], flags["name"])
run_dir.mkdir(parents=True)
rl = {"success": rate / 10, "ci": [0.0, 1.0], "num_tasks": 10}
(run_dir / "summary.json").write_text(json.dumps({
    "overall": {"cold_start": {"success": 0.2}, "rl": rl}, "gain": {"points": 100 * rate / 10 - 20, "ci": [-5.0, 50.0]},
    "num_faults": 0, "wall_s": 60.0, "flags": flags,
}))
"""


def write(path: Path, **spec: object) -> Path:
    file = path / "rates.yaml"
    file.write_text(sweep.yaml.safe_dump(spec, sort_keys=False))
    return file


def rates_sweep(path: Path, rates: list[int]) -> Path:
    (path / "program.py").write_text(PROGRAM)
    parameters = {"rl.learning_rate": {"values": rates}}
    return write(path, program=str(path / "program.py"), method="grid", parameters=parameters)


def parse(flags: list[str]) -> RunConfig:
    """What `experiments/quickstart.py` makes of its command line."""
    return tyro.cli(Arguments, default=Arguments(config()), args=flags).run


def test_a_grid_is_every_combination_with_the_last_parameter_fastest(tmp_path):
    parameters = {"a.x": {"values": [1, 2]}, "b": {"value": "s"}, "c": {"values": [0.5, 0.25]}}
    loaded = sweep.load_sweep(write(tmp_path, name="n", program="p.py", method="grid", parameters=parameters))
    assert (loaded.name, loaded.program) == ("n", "p.py")
    assert [tuple(point.values()) for point in loaded.points] == [
        (1, "s", 0.5), (1, "s", 0.25), (2, "s", 0.5), (2, "s", 0.25)
    ]  # fmt: skip
    assert list(loaded.points[0]) == ["a.x", "b", "c"]


def test_random_values_follow_wandbs_rules_and_the_seed(tmp_path):
    parameters = {
        "whole": {"min": 1, "max": 3},
        "real": {"min": 0.0, "max": 1.0},
        "log": {"min": 1e-5, "max": 1e-3, "distribution": "log_uniform_values"},
        "one_of": {"values": ["a", "b"]},
        "fixed": {"value": 7},
    }
    points = list(itertools.islice(sweep.draws(parameters, random.Random(0)), 200))
    assert {point["whole"] for point in points} == {1, 2, 3}
    assert all(0.0 <= point["real"] <= 1.0 and 1e-5 <= point["log"] <= 1e-3 for point in points)
    assert 70 < sum(point["log"] < 1e-4 for point in points) < 130, "half of the draws lie below the geometric mean"
    assert {point["one_of"] for point in points} == {"a", "b"} and {point["fixed"] for point in points} == {7}
    file = write(tmp_path, program="p", method="random", run_cap=3, parameters=parameters)
    assert sweep.load_sweep(file).points == tuple(points[:3])
    assert sweep.load_sweep(file, num_runs=2, seed=1).points != tuple(points[:2])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"method": "bayes"}, "needs wandb's server"),
        ({"method": "random"}, "run_cap"),
        ({"parameters": {"x": {"min": 0, "max": 1}}}, "a grid needs value or values"),
        ({"parameters": {"x": {"values": []}}}, "no values"),
        ({"method": "random", "run_cap": 1, "parameters": {"x": {"min": "1e-5", "max": 1}}}, "YAML reads 1e-5 as text"),
        (
            {"method": "random", "run_cap": 1, "parameters": {"x": {"min": 0, "max": 1, "distribution": "beta"}}},
            "'beta'",
        ),
    ],
)
def test_what_cannot_run_here_is_refused_with_the_reason(tmp_path, changed, says):
    file = write(tmp_path, **{"program": "p", "method": "grid", "parameters": {"x": {"value": 1}}, **changed})
    with pytest.raises(ValueError, match=says):
        sweep.load_sweep(file)


def test_a_file_that_is_no_sweep_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected the keys program, method and parameters"):
        sweep.load_sweep(write(tmp_path, program="p"))


def test_runs_are_collected_into_rows_and_finished_ones_are_not_repeated(tmp_path, capfd):
    file, json_file = rates_sweep(tmp_path, [1, 5]), tmp_path / "out/rows.json"
    arguments = [str(file), "--runs-dir", str(tmp_path / "runs"), "--json", str(json_file), "--", "--seed=4"]
    assert sweep.main(arguments) == 0
    found = json.loads(json_file.read_text())
    assert [(row["name"], row["value"], row["unit"]) for row in found] == [
        ("rates/rl.learning_rate=1: success", 0.1, "share"),
        ("rates/rl.learning_rate=1: gain", -10.0, "points"),
        ("rates/rl.learning_rate=5: success", 0.5, "share"),
        ("rates/rl.learning_rate=5: gain", 30.0, "points"),
    ]
    assert all(set(row) == {"name", "value", "unit", "goal", "met", "how"} for row in found)
    summary = json.loads((tmp_path / "runs/rates/rl.learning_rate=5/summary.json").read_text())
    assert summary["flags"]["seed"] == "4", "flags after -- reach every run"
    table = capfd.readouterr().out.split("rates: success on held-out tasks")[1]
    assert table.index("50%") < table.index("10%"), "the best run comes first"
    (tmp_path / "program.py").write_text("raise SystemExit('must not run again')")
    assert sweep.main(arguments) == 0


def test_a_failed_run_is_said_and_the_others_still_run(tmp_path, capfd):
    assert sweep.main([str(rates_sweep(tmp_path, [3, 5])), "--runs-dir", str(tmp_path / "runs")]) == 1
    out = capfd.readouterr().out
    assert "run 1 failed: exit status 1" in out and "50%" in out and "failed" in out.split("held-out tasks")[1]


def test_the_quickstart_sweep_names_fields_that_the_quickstart_has():
    loaded = sweep.load_sweep(QUICKSTART_LR)
    assert len(loaded.points) == 4 and (QUICKSTART_LR.parents[2] / loaded.program).is_file()
    for point in loaded.points:
        flags = sweep.command(loaded, point, Path("elsewhere"), [])[2:]
        parsed = parse(flags)
        assert parsed.rl.learning_rate == point["rl.learning_rate"] and parsed.seed == point["seed"]
        assert parsed.run_dir == Path("elsewhere", sweep.run_name(loaded, point))
    assert len({sweep.run_name(loaded, point) for point in loaded.points}) == 4


def test_wandbs_agent_gives_each_run_of_the_quickstart_sweep_its_values_and_a_name_of_its_own():
    spec = sweep.yaml.safe_load(QUICKSTART_LR.read_text())
    arguments = create_sweep_command_args({"args": {"rl.learning_rate": {"value": 0.0001}, "seed": {"value": 0}}})
    # wandb's own composition (wandb_agent.Agent._command_run), with a program that prints its arguments.
    macros = {"env": ["/usr/bin/env"], "interpreter": ["printf"], "program": [r"%s\n"], "args": arguments["args"]}
    argv = [
        part
        for chunk in create_sweep_command(list(spec["command"]))
        for part in (macros[chunk[2:-1]] if chunk.startswith("${") and chunk.endswith("}") else [chunk])
    ]
    printed = subprocess.run(
        argv, env={"WANDB_RUN_ID": "abc123", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    flags = printed.stdout.split()
    assert flags == ["--rl.learning_rate=0.0001", "--seed=0", "--name=quickstart_lr/abc123"]
    parsed = parse(flags)
    assert (parsed.name, parsed.rl.learning_rate) == ("quickstart_lr/abc123", 0.0001)
