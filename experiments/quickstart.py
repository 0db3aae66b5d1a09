"""Quickstart: SmolLM2-135M-Instruct, frozen, learns three domains in real sandboxes, from a cold start to RL.

    python experiments/quickstart.py                 # the whole run; the same command again resumes it
    python experiments/quickstart.py --help          # every field
"""

from __future__ import annotations


import tyro

import envs
from envs.sandbox import default_factory
from postrl.config import RunConfig
from postrl.policy.base import smollm2_135m
from postrl.run import train
from postrl.run_state import Parts
from verifiers.router import verify


def config() -> RunConfig:
    return RunConfig(name="quickstart")


def parts() -> Parts:
    return Parts(base=smollm2_135m(), domains=envs.domains(), verify=verify, sandboxes=default_factory())


def main() -> None:
    train(tyro.cli(RunConfig, default=config()), parts())


if __name__ == "__main__":
    main()
