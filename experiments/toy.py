"""Toy: a transformer of 0.1M parameters, trained from nothing, learns a tiny domain in real sandboxes. Copy it for a domain.

    python experiments/toy.py                        # the whole run; the same command again resumes it
    python experiments/toy.py --help                 # every field

Expect 35 to 50 s on two cores, and a held-out success of 85 % at least, 30 points or more above the cold start (seed 0,
the default, and seeds 1, 2: 0 % before, 0, 58, 60 % after the cold start, 100, 100, 79 % after RL).

Everything that a new domain needs is in this file: a generator, an environment with one tool, a verifier. A task says
`above 482913`; the reply that solves it writes a larger number to the file n. The cold start is too short to learn how to
read the number: it teaches the form of a reply and to name numbers like the demonstrations'. RL finds what no demonstration
says: numbers that begin with 5 are above nearly all.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import jax
import numpy as np
import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from envs.sandbox import default_factory
from envs.splits import draw
from envs.tool_calls import Tool
from envs.tool_env import Effect, ToolEnv, describe
from postrl.config import (
    ColdStartConfig,
    DomainConfig,
    LearnerConfig,
    RlConfig,
    RolloutConfig,
    RunConfig,
    TrainableConfig,
)
from postrl.contracts import Domain, Files, Finding, Resources, Sandbox, SandboxFactory, Split, Task, ToolCall, Verdict
from postrl.learner.batch import RowShape
from postrl.policy.base import Base
from postrl.policy.chat import ChatFormat
from postrl.policy.model import ModelConfig, param_specs
from postrl.policy.spec import initialize
from postrl.rollout.engine import EngineConfig
from postrl.run import train
from postrl.run_state import Parts

# ------------------------------------------------------------------------------------------------------ the domain

KINDS = ("above",)
RESOURCES = Resources(timeout_s=5.0, cpu_s=2, memory_mb=256, disk_mb=1, file_mb=1, num_processes=8)


def generate(split: Split, seed: int, index: int) -> Task:
    """The task of that name; `draw` repeats `make_task` until the content falls into the split."""
    return draw("toy", split, seed, index, functools.partial(make_task, split, seed, index))


def make_task(split: Split, seed: int, index: int, rng: np.random.Generator) -> Task:
    """Drawn from `rng` alone. The reference is what a demonstration replies, and must score 1."""
    # The mean of two has its peak in the middle: demonstrations' commonest first digit is right about half the time.
    number = int(rng.integers(100_000, 600_000, size=2).mean())
    answer = number + int(rng.integers(1, 10_000))
    return Task(
        domain="toy",
        kind="above",
        split=split,
        seed=seed,
        index=index,
        system="sh",
        prompt=f"above {number}",
        files={},
        expected={"above": number},
        reference=(f"```sh\necho {answer} >n\n```",),
        resources=RESOURCES,
    )


class ToyEnv(ToolEnv):
    """One turn: the script of the reply's `sh` block runs in the sandbox, and what it left is judged."""

    domain = "toy"
    tools = (Tool("sh"),)
    generate = staticmethod(generate)

    def act(self, call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
        result = sandbox.exec(["sh", "-c", call.body])
        return Effect(describe(result, task.resources.timeout_s), done=True)


def verify(task: Task, artifacts: Files, sandboxes: SandboxFactory) -> Verdict:
    """1 when the file n holds a number above the task's, in at most nine digits.

    The file is read as data: nothing that the policy wrote is run. A check that needs a program runs it in a sandbox of
    its own (`verifiers/checking.py`).
    """
    del sandboxes
    written = artifacts.get("work/n", b"").strip()
    success = re.fullmatch(rb"[0-9]{1,9}", written) is not None and int(written) > task.expected["above"]
    finding = Finding("n", f"expected a number above {task.expected['above']}, found {written[:20]!r}")
    return Verdict(float(success), success, {"n": float(success)}, () if success else (finding,), VERIFIER)


VERIFIER = f"toy@{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]}"
DOMAIN = Domain("toy", KINDS, generate, lambda sandboxes: ToyEnv(sandboxes=sandboxes))

# ------------------------------------------------------------------------------------------------------- the model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_chat() -> ChatFormat:
    """ChatML over bytes: 256 byte tokens and the two control tokens, no merges."""
    control = ["<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return ChatFormat(tokenizer, TEMPLATE, bos_token=control[0], eos_token=control[1])


def random_base(seed: int = 0) -> Base:
    """A model that knows nothing: two layers, 0.1M parameters."""
    model = ModelConfig(
        num_layers=2, model_dim=64, num_heads=2, num_kv_heads=2, head_dim=32, ffw_dim=128, vocab_size=258
    )
    return Base("random-2x64", model, initialize(param_specs(model), jax.random.key(seed)), byte_chat())


# --------------------------------------------------------------------------------------------------------- the run


def config() -> RunConfig:
    return RunConfig(
        name="toy",
        domains={"toy": DomainConfig(num_demonstrations=64, groups_per_step=8, num_heldout=48)},
        trainable=TrainableConfig(lora_rank=0),
        cold_start=ColdStartConfig(num_epochs=8, batch_size=16, learning_rate=4e-3),
        rl=RlConfig(num_steps=24, group_size=8, learning_rate=2e-3),
        learner=LearnerConfig(row_shapes=(RowShape(256, 192),), max_rows=16),
        rollout=RolloutConfig(
            engine=EngineConfig(max_requests=16, max_context=128, num_pages=256, max_step_tokens=64),
            max_new_tokens=28,
        ),
        checkpoint_every=10,
    )


def parts() -> Parts:
    return Parts(base=random_base(), domains={"toy": DOMAIN}, verify=verify, sandboxes=default_factory())


def main() -> None:
    train(tyro.cli(RunConfig, default=config()), parts())


if __name__ == "__main__":
    main()
