"""Runs of the toy: one whole run that a session shares, and opened runs whose parts a test may break."""

import dataclasses

import pytest

from experiments import toy
from postrl.config import ColdStartConfig, DomainConfig, RlConfig, TrainableConfig
from postrl.run import train
from postrl.run_state import open_run


@pytest.fixture(scope="session", autouse=True)
def without_wandb():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        yield


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """The directory of the toy as `python experiments/toy.py` runs it."""
    return train(dataclasses.replace(toy.config(), runs_dir=tmp_path_factory.mktemp("runs")), toy.parts())


@pytest.fixture
def small_config(tmp_path):
    """An adapter on the toy's base, a handful of tasks."""
    return dataclasses.replace(
        toy.config(),
        runs_dir=tmp_path,
        trainable=TrainableConfig(lora_rank=4, lora_alpha=8.0),
        domains={"toy": DomainConfig(num_demonstrations=4, groups_per_step=2, num_heldout=4)},
        cold_start=ColdStartConfig(num_epochs=1, batch_size=2),
        rl=RlConfig(num_steps=4, group_size=4, max_steps_without_signal=3),
    )


@pytest.fixture
def run(small_config):
    """An opened run before its first phase. Tests exchange its parts before they use it."""
    with open_run(small_config, toy.parts()) as run:
        yield run
