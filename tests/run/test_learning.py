"""What an update does: LoRA leaves the base's bytes alone and changes what the engine samples; full training changes all."""

import dataclasses
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import toy
from postrl.audit import AuditFailure
from postrl.cold_start import cold_start
from postrl.config import ColdStartConfig, DomainConfig, RlConfig, TrainableConfig
from postrl.contracts import Message, Verdict
from postrl.learner.step import init_state
from postrl.rollout.engine import PolicySampler, tree_digest
from postrl.run import draw, learner_data
from postrl.run_state import open_run
from postrl.step_audit import audit_step


def alternating():
    """A verifier that gives each group different rewards, whatever the untrained policy does."""
    num_seen, lock = Counter(), threading.Lock()

    def verify(task, artifacts, sandboxes):
        del artifacts, sandboxes
        with lock:  # counted by task: the groups' episodes end in any order
            num_seen[task.id] += 1
            success = num_seen[task.id] % 2 == 0
        return Verdict(float(success), success, {"turn": float(success)}, (), "alternating@1")

    return verify


def logprobs(run) -> np.ndarray:
    """What the engine gives a fixed prompt: the log-probabilities of 8 tokens sampled with a fixed seed."""
    prompt_T = run.parts.base.chat.opening((Message("system", "sh"), Message("user", "put 1234 in a")))
    sampler = PolicySampler(run.engine, temperature=1.0, max_new_tokens=8)
    completion = sampler.sample(prompt_T, seed=3)
    return completion.logprob_T


@pytest.fixture(scope="module", params=[4, 0], ids=["lora", "full"])
def updated(request, tmp_path_factory):
    """Two RL steps on an untrained policy; before the second, the engine's copy is falsified behind the run's back."""
    config = dataclasses.replace(
        toy.config(),
        runs_dir=tmp_path_factory.mktemp("runs"),
        trainable=TrainableConfig(lora_rank=request.param, lora_alpha=8.0),
        domains={"toy": DomainConfig(num_demonstrations=4, groups_per_step=2, num_heldout=4)},
        cold_start=ColdStartConfig(num_epochs=1, batch_size=2),
        rl=RlConfig(num_steps=2, group_size=4, learning_rate=1e-2, num_warmup_steps=1),
    )
    seen = SimpleNamespace(rank=request.param)
    with open_run(config, dataclasses.replace(toy.parts(), verify=alternating())) as run:
        seen.base_before = tree_digest(run.parts.base.params)
        state = init_state(run.initial_trainable(), run.rl_optimizer)
        seen.trainable_before = tree_digest(state.trainable)
        step_config = run.step_config(config.rl.loss, run.rl_optimizer, temperature=config.rl.temperature)
        step_of = run.compile_step("rl", step_config, state)
        run.publish(state.trainable, version=1)
        seen.logprobs_before, seen.logprobs_again = logprobs(run), logprobs(run)
        groups = draw(run, 0)
        data = learner_data(run, groups, run.collect("rl", 0, groups, temperature=1.0))
        state, seen.metrics = step_of(state, data.batch)
        run.publish(state.trainable, version=2)
        audit_step(run, 0, data, seen.metrics)
        seen.base_after, seen.trainable_after = tree_digest(run.parts.base.params), tree_digest(state.trainable)
        seen.logprobs_after = logprobs(run)

        params, adapter = run.engine._policy
        run.engine._policy = (params.replace(final_norm=params.final_norm * 1.01), adapter)
        groups = draw(run, 1)
        data = learner_data(run, groups, run.collect("rl", 1, groups, temperature=1.0))
        state, metrics = step_of(state, data.batch)
        with pytest.raises(AuditFailure) as failure:
            audit_step(run, 1, data, metrics)
        seen.failure = str(failure.value)
    return seen


def test_the_bases_bytes_never_change(updated):
    assert updated.base_after == updated.base_before


def test_what_is_trained_changes(updated):
    assert updated.trainable_after != updated.trainable_before
    assert (updated.trainable_before == updated.base_before) == (updated.rank == 0)


def test_the_first_update_changes_what_the_engine_samples(updated):
    np.testing.assert_array_equal(updated.logprobs_again, updated.logprobs_before)
    assert np.abs(updated.logprobs_after[0] - updated.logprobs_before[0]) > 1e-4


def test_sampler_and_learner_agree(updated):
    assert updated.metrics["logprob_gap.max"] < 1e-4


def test_a_sampler_with_other_weights_stops_the_run(updated):
    assert updated.failure.startswith("sampler and learner agree: Log-probabilities of sampled tokens, recomputed by")
    assert "sampler and learner are not the same policy" in updated.failure


def test_the_cold_start_does_not_depend_on_the_temperature_of_sampling(tmp_path):
    """Trained under tempered logits, a policy would sample at 0.5 what it should sample at 1, and nothing were gained."""
    digests = set()
    for temperature in (1.0, 0.5):
        config = dataclasses.replace(
            toy.config(),
            name=f"toy-{temperature}",
            runs_dir=tmp_path,
            domains={"toy": DomainConfig(num_demonstrations=4, groups_per_step=2, num_heldout=4)},
            cold_start=ColdStartConfig(num_epochs=1, batch_size=2),
            rl=RlConfig(num_steps=2, temperature=temperature, num_warmup_steps=1),
        )
        with open_run(config, toy.parts()) as run:
            digests.add(tree_digest(cold_start(run)))
    assert len(digests) == 1
