"""A short run for test_kill.py, started again and again: `python -m tests.run.killed_run RUNS_DIR PARAMS.npz`.

Its base is the toy after its cold start (the parameters come from a file), so that groups have different rewards from the
first step on and every step changes the adapter.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import toy
from postrl.config import ColdStartConfig, DomainConfig, RlConfig, RunConfig, TrainableConfig
from postrl.run import train
from postrl.run_state import Parts

NUM_STEPS = 6


def config(runs_dir: Path) -> RunConfig:
    return dataclasses.replace(
        toy.config(),
        name="killed",
        runs_dir=runs_dir,
        checkpoint_every=2,
        trainable=TrainableConfig(lora_rank=4, lora_alpha=8.0),
        domains={"toy": DomainConfig(num_demonstrations=8, groups_per_step=3, num_heldout=4)},
        cold_start=ColdStartConfig(num_epochs=1, batch_size=4, learning_rate=1e-4),
        rl=RlConfig(num_steps=NUM_STEPS, group_size=4, learning_rate=1e-3),
    )


def save_params(path: Path, params) -> None:
    np.savez(path, *jax.tree.leaves(params))


def load_parts(path: Path) -> Parts:
    parts = toy.parts()
    structure = jax.tree.structure(parts.base.params)
    with np.load(path) as arrays:
        params = structure.unflatten([jnp.asarray(arrays[f"arr_{i}"]) for i in range(structure.num_leaves)])
    return dataclasses.replace(parts, base=dataclasses.replace(parts.base, params=params))


if __name__ == "__main__":
    train(config(Path(sys.argv[1])), load_parts(Path(sys.argv[2])))
