"""Quickstart: SmolLM2-135M-Instruct, its weights frozen, learns three domains in real sandboxes by an adapter.

    python experiments/quickstart.py           # the whole run; the same command again resumes it
    python experiments/quickstart.py --proof   # the same for seeds 0, 1, 2 on 201 held-out tasks each
    python experiments/quickstart.py --help    # every field of the config

The base solves next to nothing; a cold start on reference trajectories brings first successes in every domain, and
reinforcement learning (GRPO) goes on from there. The README says what came out, experiments/LOG.md what was tried.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

import envs
from envs.sandbox import default_factory
from postrl.config import ColdStartConfig, DomainConfig, RlConfig, RunConfig
from postrl.policy.base import smollm2_135m
from postrl.run import train
from postrl.run_state import Parts
from verifiers.router import verify

PROOF_SEEDS = (0, 1, 2)
PROOF_NUM_HELDOUT = 67
"""Tasks a domain, so 201 in all."""


def config() -> RunConfig:
    """Every step sees nearly every kind of task; few demonstrations, so that there is something left to learn."""
    return RunConfig(
        name="quickstart",
        domains={
            "shell": DomainConfig(num_demonstrations=16, groups_per_step=7),
            "code_repair": DomainConfig(num_demonstrations=8, groups_per_step=6),
            "filing_fields": DomainConfig(num_demonstrations=12, groups_per_step=8),
        },
        cold_start=ColdStartConfig(learning_rate=1.2e-3),
        # Sampled at 1 the policy of so short a cold start writes garbage where greedy decoding is right: at 0.7 it succeeds
        # nearly as often as greedily, and every step teaches something from the first on (experiments/LOG.md).
        rl=RlConfig(num_steps=26, learning_rate=1e-4, num_warmup_steps=1, num_decay_steps=6, temperature=0.7),
    )


def parts() -> Parts:
    """The default base, the three domains of `envs`, their verifiers, and this machine's sandboxes."""
    return Parts(base=smollm2_135m(), domains=envs.domains(), verify=verify, sandboxes=default_factory())


def prove(run: RunConfig) -> None:
    """One run a seed; `runs/<name>-proof.json` and a table of the gains."""
    composed, summaries = parts(), {}
    for seed in PROOF_SEEDS:
        domains = {name: dataclasses.replace(d, num_heldout=PROOF_NUM_HELDOUT) for name, d in run.domains.items()}
        seeded = dataclasses.replace(run, name=f"{run.name}-proof-{seed}", seed=seed, domains=domains)
        summaries[seed] = json.loads((train(seeded, composed) / "summary.json").read_text())
    gains = [summary["gain"]["points"] for summary in summaries.values()]
    result = {"median_gain_points": statistics.median(gains), "seeds": summaries}
    path = run.runs_dir / f"{run.name}-proof.json"
    path.write_text(json.dumps(result, indent=1))
    console = Console()
    console.print(proof_table(summaries))
    console.print(f"median gain of RL over the cold start: {result['median_gain_points']:.1f} points · {path}")


def proof_table(summaries: dict[int, dict[str, Any]]) -> Table:
    table = Table(title="RL over the cold start, held-out tasks", title_justify="left")
    for column in ("seed", "tasks", "base", "cold start", "RL", "gain, points [95 %]", "minutes"):
        table.add_column(column, justify="right")
    for seed, summary in summaries.items():
        overall, gain = summary["overall"], summary["gain"]
        rates = [f"{100 * overall[stage]['success']:.0f} %" for stage in ("base", "cold_start", "rl")]
        interval = f"{gain['points']:+.1f} [{gain['ci'][0]:.1f}, {gain['ci'][1]:.1f}]"
        table.add_row(str(seed), str(overall["rl"]["num_tasks"]), *rates, interval, f"{summary['wall_s'] / 60:.1f}")
    return table


@dataclasses.dataclass(frozen=True)
class Arguments:
    # Booleans take a value (`--rl.normalize-std False`), as wandb's sweeps spell them.
    run: Annotated[RunConfig, tyro.conf.FlagConversionOff, tyro.conf.arg(name="")]
    proof: bool = False
    """Repeat the run for three seeds on more held-out tasks, and print the gains."""


def main() -> None:
    arguments = tyro.cli(Arguments, default=Arguments(config()))
    if arguments.proof:
        prove(arguments.run)
    else:
        train(arguments.run, parts())


if __name__ == "__main__":
    main()
