"""Each invariant of a run, broken on purpose: the run stops, says so in a plain sentence, and leaves the evidence."""

import dataclasses
import json
import sqlite3

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers

from experiments import toy
from postrl.audit import AuditFailure
from postrl.cold_start import demonstrate, reference_sampler
from postrl.contracts import (
    Completion,
    InfraError,
    InfraFault,
    Message,
    Scored,
    StopReason,
    Trajectory,
    Turn,
    Verdict,
)  # fmt: skip
from postrl.learner.group_batch import EndedEpisode, step_data
from postrl.policy.chat import ChatFormat
from postrl.preflight import (
    check_base,
    check_engine,
    check_splits,
    check_tokenizer,
    check_verifiers,
    one_task_of_each_kind,
    preflight,
)  # fmt: skip
from postrl.rollout.engine import Engine, tree_digest
from postrl.run import draw, learner_data
from postrl.step_audit import audit_step
from postrl.summary import check_end

GOOD = {"logprob_gap.max": 0.0, "logprob_gap.relative.max": 0.0, "loss": 0.1, "grad_norm": 0.5, "update_norm": 1e-3}


def stops(run, check: str, sentence: str, act) -> None:
    """`act` must stop the run at `check` with words that match `sentence`, and audit.json must say so."""
    with pytest.raises(AuditFailure, match=sentence) as failure:
        act()
    assert str(failure.value).startswith(f"{check}: ")
    audit = json.loads((run.run_dir / "audit.json").read_text())
    assert audit["status"] == "failed"
    last = audit["checks"][-1]
    assert (last["name"], last["status"]) == (check, "failed")
    assert last["sentence"] in str(failure.value)


def with_parts(run, **parts):
    run.parts = dataclasses.replace(run.parts, **parts)
    return run


def with_chat(run, chat):
    return with_parts(run, base=dataclasses.replace(run.parts.base, chat=chat))


def with_domain(run, **changes):
    return with_parts(run, domains={"toy": dataclasses.replace(toy.DOMAIN, **changes)})


def scores(reward: float):
    return lambda task, artifacts, sandboxes: Verdict(reward, reward == 1.0, {"all": reward}, (), "fixed@1")


def ended(outcome, *, version: int = 1) -> EndedEpisode:
    """An episode of one turn of two sampled tokens."""
    task = toy.generate("train", 0, 0)
    sampled = Completion(
        np.array([5, 1], np.int32), np.full(2, -1.0, np.float32), np.full(2, version, np.int32), StopReason.STOP
    )
    turn = Turn(np.arange(4, dtype=np.int32), sampled, "a", None, "b")
    return EndedEpisode("toy", outcome, Trajectory(task, 0, (turn,), True, False, {}, (), 0.0))


def scored(reward: float) -> Scored:
    return Scored(scores(reward)(None, {}, None))


def data_of(run, outcomes, **kwargs):
    learner = run.config.learner
    group = [ended(outcome, **kwargs) for outcome in outcomes]
    return step_data([group], normalize_std=True, shapes=learner.row_shapes, max_rows=learner.max_rows)


# ------------------------------------------------------------------------------------------------------- preflight


def test_a_verifier_that_rewards_silence(run):
    with_parts(run, verify=scores(1.0))
    stops(run, "no-op scores 0", r"Not so for \['toy/above/train-0-0'\]: rewards of these kinds can't be trusted",
          lambda: check_verifiers(run, one_task_of_each_kind(run)))  # fmt: skip


def test_a_verifier_that_refuses_the_reference(run):
    with_parts(run, verify=scores(0.0))
    stops(run, "reference scores 1", r"Not so for \['toy/above/train-0-0'\]", lambda: preflight(run))


def test_an_environment_whose_tools_are_missing(run):
    """The reference fails in the sandbox, so nothing could ever be learned."""

    class Broken(toy.ToyEnv):
        def act(self, call, task, sandbox):
            raise InfraError("sh: not found")

    with_domain(run, make_env=lambda sandboxes: Broken(sandboxes=sandboxes))
    stops(run, "reference scores 1", "sh: not found", lambda: check_verifiers(run, one_task_of_each_kind(run)))


def test_demonstrations_that_do_not_score(run):
    def refuses_one(task, artifacts, sandboxes):
        return scores(0.0)(task, artifacts, sandboxes) if task.index == 2 else toy.verify(task, artifacts, sandboxes)

    with_parts(run, verify=refuses_one)
    stops(run, "demonstrations score 1", r"1 of 4 reference trajectories did not score 1, toy/above/train-0-2 first",
          lambda: demonstrate(run))  # fmt: skip


def test_splits_that_overlap(run):
    with_domain(run, generate=lambda split, seed, index: toy.generate("train", seed, index))
    stops(run, "held-out tasks are held out", "4 held-out tasks are also trained on", lambda: check_splits(run))


def test_held_out_tasks_that_repeat(run):
    with_domain(run, generate=lambda split, seed, index: toy.generate(split, seed, index // 2))
    stops(run, "held-out tasks are held out", "0 held-out tasks are also trained on and 2 occur twice",
          lambda: check_splits(run))  # fmt: skip


def test_a_kind_that_is_never_generated(run):
    with_domain(run, kinds=("above", "take"))
    stops(run, "toy generates every kind", r"The generator of toy never gave \['take'\]", lambda: preflight(run))


def test_a_tokenizer_that_loses_characters(run):
    tokenizer = Tokenizer.from_str(run.parts.base.chat.tokenizer.to_str())
    tokenizer.normalizer = normalizers.Replace(">", "")
    with_chat(run, dataclasses.replace(run.parts.base.chat, tokenizer=tokenizer))
    stops(run, "tokenizer round trip", r"changes references \(\['toy/above/train-0-0'\]\)",
          lambda: check_tokenizer(run, one_task_of_each_kind(run)))  # fmt: skip


def test_an_observation_that_could_end_a_turn(run):
    class Trusting(ChatFormat):
        def _plain(self, text):
            return self._special(text)

    chat = run.parts.base.chat
    with_chat(run, Trusting(chat.tokenizer, chat.template, chat.bos_token, chat.eos_token))
    stops(run, "tokenizer round trip", r"lets observations end a turn \(1 end tokens\)",
          lambda: check_tokenizer(run, one_task_of_each_kind(run)))  # fmt: skip


@pytest.mark.parametrize("cause", ["neighbours", "cache"])
def test_sampling_that_depends_on_company_or_cache(run, cause):
    """Bits that move with the number of requests in a step, or where a prompt's beginning was found in the cache."""
    compute = run.engine._compute

    def depends(params, adapter, cache, batch):
        token_R, logprob_R, cache = compute(params, adapter, cache, batch)
        sequence_T, position_T = batch.sequence_T[: batch.num_tokens], batch.position_T[: batch.num_tokens]
        first_T = np.flatnonzero(np.diff(sequence_T, prepend=-1))
        lengths = np.diff(first_T, append=len(sequence_T))
        num = len(lengths) if cause == "neighbours" else np.sum((lengths > 1) & (position_T[first_T] > 0))
        return token_R, logprob_R + np.float32(1e-6) * num, cache

    run.engine._compute = depends
    stops(run, "sampling does not depend on neighbours", "a resumed run would sample other tokens",
          lambda: check_engine(run, one_task_of_each_kind(run)[0]))  # fmt: skip


def test_the_unbroken_toy_passes(run):
    tasks = one_task_of_each_kind(run)
    check_splits(run)
    check_tokenizer(run, tasks)
    check_verifiers(run, tasks)
    check_engine(run, tasks[0])
    demonstrate(run)
    audit = json.loads((run.run_dir / "audit.json").read_text())
    assert audit["status"] == "running"
    assert {check["status"] for check in audit["checks"]} == {"passed"}


# ----------------------------------------------------------------------------------------------------- publication


def test_a_publication_that_loses_a_leaf(run, monkeypatch):
    real = Engine.publish

    def forgetful(engine, params, adapter, version):
        return real(engine, params, adapter.replace(wq=adapter.wk), version)

    trainable = run.initial_trainable()
    run.publish(trainable, version=0)
    monkeypatch.setattr(Engine, "publish", forgetful)
    stops(run, "sampler weights = learner weights", "the publication lost or altered leaves",
          lambda: run.publish(trainable, version=1))  # fmt: skip


def test_a_publication_of_zeros(run, monkeypatch):
    real = Engine.publish

    def frozen(engine, params, adapter, version):
        return real(engine, params, adapter.replace(wo=adapter.wo.replace(a=jnp.zeros_like(adapter.wo.a))), version)

    monkeypatch.setattr(Engine, "publish", frozen)
    stops(run, "sampler weights = learner weights", "other weights than the learner trained",
          lambda: run.publish(run.initial_trainable(), version=0))  # fmt: skip


# ------------------------------------------------------------------------------------------------------- each step


def test_a_healthy_step_passes(run):
    audit_step(run, 0, data_of(run, [scored(1.0), scored(0.0)]), GOOD)
    audit = json.loads((run.run_dir / "audit.json").read_text())
    assert [check["status"] for check in audit["checks"]] == ["passed"] * 5


def test_rewards_that_stay_constant(run):
    constant = data_of(run, [scored(0.0), scored(0.0)])
    assert constant.batch is None
    audit_step(run, 0, constant, {})
    audit_step(run, 1, data_of(run, [scored(1.0), scored(0.0)], version=2), GOOD)  # one good step starts the count anew
    audit_step(run, 2, data_of(run, [scored(0.0)] * 2, version=3), {})
    audit_step(run, 3, data_of(run, [scored(0.0)] * 2, version=4), {})
    stops(run, "rewards are not constant", r"In the last 3 steps every group got one reward .* \(mean reward 0.00\)",
          lambda: audit_step(run, 4, data_of(run, [scored(0.0)] * 2, version=5), {}))  # fmt: skip


@pytest.mark.parametrize(("version", "distance"), [(0, 1), (2, -1)])
def test_tokens_of_another_version(run, version, distance):
    data = data_of(run, [scored(1.0), scored(0.0)], version=version)
    stops(run, "staleness within bound", f"sampled by version {version}, {distance} versions from 1; allowed are 0",
          lambda: audit_step(run, 0, data, GOOD))  # fmt: skip


def test_too_many_faults(run):
    data = data_of(run, [scored(1.0), scored(0.0), InfraFault("episode", "bwrap died")])
    stops(run, "faults within bound", "33% of the step's episodes ended in a fault of ours.*bwrap died.*start the same",
          lambda: audit_step(run, 0, data, GOOD))  # fmt: skip


def test_a_sandbox_that_breaks_after_preflight(run):
    class Failing:
        """Makes two sandboxes and then no more."""

        def __init__(self, factory):
            self._factory, self._left = factory, 2

        def create(self, *args, **kwargs):
            self._left -= 1
            if self._left < 0:
                raise InfraError("no user namespaces left")
            return self._factory.create(*args, **kwargs)

    check_verifiers(run, one_task_of_each_kind(run))
    del run.collector
    with_parts(run, sandboxes=Failing(run.parts.sandboxes))
    groups = draw(run, 0)
    recorded = run.collector.collect(groups, lambda task: reference_sampler(run, task))
    assert sum(isinstance(e.outcome, Scored) for e in recorded) == 2
    stops(run, "faults within bound", "75% of the step's episodes.*InfraError: no user namespaces left",
          lambda: audit_step(run, 0, learner_data(run, groups, recorded), {}))  # fmt: skip


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        ("update_norm", 0.0, "nothing is trained; is the adapter connected"),
        ("grad_norm", 0.0, "nothing is trained; is the adapter connected"),
        ("grad_norm", float("nan"), "not finite; lower the learning rate"),
        ("loss", float("inf"), "not finite; lower the learning rate"),
    ],
)
def test_an_update_that_does_nothing(run, metric, value, words):
    data = data_of(run, [scored(1.0), scored(0.0)])
    stops(run, "the update changes the policy", words, lambda: audit_step(run, 0, data, GOOD | {metric: value}))


@pytest.mark.parametrize(("step", "kind"), [(0, "logprob_gap.max"), (1, "logprob_gap.relative.max")])
@pytest.mark.parametrize(("exact", "gap"), [(True, 1e-9), (False, 1.1e-4), (True, float("nan"))])
def test_a_gap_between_sampler_and_learner(run, monkeypatch, exact, gap, step, kind):
    """Where the forward is exact no difference is small enough."""
    monkeypatch.setattr("postrl.policy.ops.is_exact", lambda: exact)
    data = data_of(run, [scored(1.0), scored(0.0)])
    if not exact:
        audit_step(run, step, dataclasses.replace(data, oldest_version=step + 1), GOOD | {kind: 0.9e-4})
    stops(run, "sampler and learner agree", "sampler and learner are not the same policy",
          lambda: audit_step(run, step, dataclasses.replace(data, oldest_version=step + 1), GOOD | {kind: gap}))  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the end


def test_a_base_that_was_written_to(run):
    params = run.parts.base.params
    run.audit.check("base bytes on record", True, "On record.", digest=tree_digest(params))
    check_end(run)
    one_bit = np.asarray(params.final_norm).view(np.int32).copy()
    one_bit[0] ^= 1
    moved = params.replace(final_norm=jnp.asarray(one_bit.view(np.float32)))
    with_parts(run, base=dataclasses.replace(run.parts.base, params=moved))
    stops(run, "the base never changed", "The frozen base was written to during the run", lambda: check_end(run))


def test_a_resumed_run_with_another_base(run):
    check_base(run)
    check_base(run)
    params = run.parts.base.params
    run.frozen = params.replace(final_norm=params.final_norm + 1)
    stops(run, "base bytes on record", "This run began on a base with other weights", lambda: check_base(run))


def test_prompts_counted_twice(run):
    run.audit.check("base bytes on record", True, "On record.", digest=tree_digest(run.parts.base.params))
    check_verifiers(run, one_task_of_each_kind(run))
    check_end(run)
    connection = sqlite3.connect(run.run_dir / "journal.db")
    with connection:  # without the constraint that would refuse it
        connection.execute("PRAGMA legacy_alter_table = ON")  # the view over the table stays as it is
        connection.execute("CREATE TABLE c AS SELECT * FROM counted")
        connection.execute("DROP TABLE counted")
        connection.execute("ALTER TABLE c RENAME TO counted")
        connection.execute("INSERT INTO counted SELECT * FROM counted LIMIT 1")
    connection.close()
    stops(run, "each prompt counted once", "evaluate:preflight: 1 prompts were counted more than once",
          lambda: check_end(run))  # fmt: skip


def test_prompts_that_were_lost(run):
    run.audit.check("base bytes on record", True, "On record.", digest=tree_digest(run.parts.base.params))
    check_verifiers(run, one_task_of_each_kind(run))
    connection = sqlite3.connect(run.run_dir / "journal.db")
    with connection:
        connection.execute("DELETE FROM counted WHERE group_id = 1")
    connection.close()
    stops(run, "each prompt counted once", "1 prompts drawn up to step 1 were never counted", lambda: check_end(run))


def test_a_resumed_run_keeps_what_was_proved_and_not_what_failed(run):
    run.audit.check("first", True, "Holds.", digest="a")
    with pytest.raises(AuditFailure):
        run.audit.check("second", False, "Does not hold.")
    again = type(run.audit)(run.run_dir / "audit.json")
    assert again.evidence("first") == {"digest": "a"}
    assert again.evidence("second") == {}


def test_the_prompt_of_a_toy_task_is_short():
    """The engine's and the learner's shapes in `toy.config` rest on it."""
    task = toy.generate("train", 0, 0)
    chat = toy.byte_chat()
    prompt_T = chat.opening((Message("system", task.system), Message("user", task.prompt)))
    assert len(prompt_T) == 43
    assert len(chat.encode_reply(task.reference[0])) <= toy.config().rollout.max_new_tokens
