"""What is proved before the first episode: verifiers, tokenizer, engine. Each check is cheap beside a run it would ruin."""

from __future__ import annotations

import numpy as np

from postrl.contracts import Completion, Message, Scored, StopReason, Task
from postrl.policy import ops
from postrl.rollout.engine import tree_digest
from postrl.rollout.episode import ReferenceSampler
from postrl.run_state import Run
from postrl.scheduler.groups import Group

PHASE = "evaluate:preflight"
NUM_PROBED_TOKENS = 8
"""Sampled by each request of the engine's probe."""


def preflight(run: Run) -> None:
    """Raises `postrl.audit.AuditFailure` at the first invariant that does not hold."""
    run.progress.phase("preflight", total=4)
    with run.timed("preflight"):
        tasks = one_task_of_each_kind(run)
        check_splits(run)
        run.progress.update(1)
        check_tokenizer(run, tasks)
        run.progress.update(2)
        check_verifiers(run, tasks)
        run.progress.update(3)
        with run.progress.waiting("the CPU kernels, compiled on first use"):
            ops.has_kernels()
        check_engine(run, tasks[0])
        run.progress.update(4)
        check_base(run)


def check_base(run: Run) -> None:
    """Records the frozen base's digest; a resumed run must have brought the same bytes."""
    if run.frozen is None:
        return
    name, digest = "base bytes on record", tree_digest(run.frozen)
    recorded = run.audit.evidence(name).get("digest", digest)
    run.audit.check(
        name,
        digest == recorded,
        "The digest of the base's weights is recorded, and every start of the run brought them."
        if digest == recorded
        else f"This run began on a base with other weights (digest {recorded[:16]}, now {digest[:16]}): bring that base, or "
        "give the run another name.",
        digest=digest,
    )


def one_task_of_each_kind(run: Run) -> list[Task]:
    """A training task of every kind. AuditFailure when a domain does not generate a kind that it names."""
    tasks = []
    for domain in (run.parts.domains[name] for name in run.config.domains):
        of_kind: dict[str, Task] = {}
        for index in range(50 * len(domain.kinds)):
            task = domain.generate("train", run.config.seed, index)
            of_kind.setdefault(task.kind, task)
            if len(of_kind) == len(domain.kinds):
                break
        missing = set(domain.kinds) - set(of_kind)
        run.audit.check(
            f"{domain.name} generates every kind",
            not missing,
            f"The generator of {domain.name} gives all {len(domain.kinds)} kinds."
            if not missing
            else f"The generator of {domain.name} never gave {sorted(missing)}.",
        )
        tasks += of_kind.values()
    return tasks


def check_splits(run: Run) -> None:
    """No held-out task is among those that the run trains on."""
    trained_on = run.demonstration_tasks() + run.rl_tasks(0, run.config.rl.num_steps)
    train = {task.content_digest for task in trained_on}
    heldout = [task.content_digest for task in run.heldout_tasks()]
    shared, repeated = sum(d in train for d in heldout), len(heldout) - len(set(heldout))
    run.audit.check(
        "held-out tasks are held out",
        shared == 0 and repeated <= len(heldout) // 50,
        f"None of the {len(heldout)} held-out tasks is among the {len(train)} training tasks."
        if shared == 0 and repeated <= len(heldout) // 50
        else f"{shared} held-out tasks are also trained on and {repeated} occur twice: the generator's space is too small.",
        num_train=len(train),
        num_heldout=len(heldout),
        num_shared=shared,
        num_repeated=repeated,
    )


def check_tokenizer(run: Run, tasks: list[Task]) -> None:
    chat = run.parts.base.chat
    broken = [
        task.id
        for task in tasks
        for reply in task.reference
        if chat.decode(chat.encode_reply(reply)).strip() != reply.strip()
    ]
    hostile = f"text {chat.eos_token} text"
    leaked = int(
        np.sum(chat.continuation(True, hostile) == chat.eos_id) - np.sum(chat.continuation(True, "text") == chat.eos_id)
    )
    run.audit.check(
        "tokenizer round trip",
        not broken and leaked == 0,
        "References survive encoding and decoding, and an end token in an observation stays text."
        if not broken and leaked == 0
        else f"The tokenizer changes references ({broken[:3]}) or lets observations end a turn ({leaked} end tokens).",
    )


def check_verifiers(run: Run, tasks: list[Task]) -> None:
    """Every kind's reference scores 1; silence, an empty reply in every turn, scores 0."""
    chat = run.parts.base.chat
    for step, (name, sampler_for, wanted) in enumerate(
        [
            ("reference scores 1", lambda task: ReferenceSampler(chat, task.reference), 1.0),
            ("no-op scores 0", lambda task: SilentSampler(chat.eos_id), 0.0),
        ]
    ):
        groups: tuple[Group, ...] = run.journal.draw(PHASE, step, tasks, group_size=1, run_seed=run.config.seed)
        with run.progress.waiting(f"{len(tasks)} episodes: {name}"):
            ended = run.collector.collect(groups, sampler_for)
        run.journal.commit_step(PHASE, step)
        wrong = [e for e in ended if not (isinstance(e.outcome, Scored) and e.outcome.verdict.reward == wanted)]
        run.audit.check(
            name,
            not wrong,
            f"Held for all {len(tasks)} kinds, in real sandboxes."
            if not wrong
            else f"Not so for {[e.episode.task.id for e in wrong][:5]}: rewards of these kinds can't be trusted.",
            wrong=[(e.episode.task.id, repr(e.outcome)) for e in wrong[:5]],
            verifiers=sorted({e.outcome.verdict.verifier for e in ended if isinstance(e.outcome, Scored)}),
        )


class SilentSampler:
    """A policy that says nothing: it ends every turn at once."""

    def __init__(self, eos_id: int):
        self._completion = Completion(
            np.array([eos_id], np.int32), np.zeros(1, np.float32), np.full(1, -1, np.int32), StopReason.STOP
        )

    def sample(self, token_T: np.ndarray, *, seed: int) -> Completion:
        return self._completion


def check_engine(run: Run, task: Task) -> None:
    """A request gives the same bits alone and among others, with its prompt computed and with it found in the cache.

    On this rests that a resumed run, whose remaining episodes meet other neighbours, samples the same tokens. The others fill
    the engine, and one of them its context, so that the prompt is computed in pieces and every step is as large as it gets.
    """
    prompt_T = run.parts.base.chat.opening((Message("system", task.system), Message("user", task.prompt)))
    engine = run.config.rollout.engine
    alone = _sample_among(run, prompt_T, [])
    cached = _sample_among(run, prompt_T, [prompt_T])
    run.publish(run.initial_trainable(), version=0)  # forgets all prompts
    longest_T = np.resize(prompt_T[::-1], engine.max_context - NUM_PROBED_TOKENS - 1)
    short = [np.roll(prompt_T, 1 + i)[:9] for i in range(engine.max_requests - 2)]
    among = _sample_among(run, prompt_T, [longest_T, *short])
    same = all(
        np.array_equal(alone.token_T, other.token_T) and np.array_equal(alone.logprob_T, other.logprob_T)
        for other in (cached, among)
    )
    run.audit.check(
        "sampling does not depend on neighbours",
        same,
        "Alone, with its prompt in the cache, and among others a request gave the same tokens and "
        "log-probabilities, bit for bit."
        if same
        else "A request's bits depend on what else is in the batch, so a resumed run would sample other tokens.",
        alone=alone.logprob_T.tolist(),
        cached=cached.logprob_T.tolist(),
        among=among.logprob_T.tolist(),
    )


def _sample_among(run: Run, prompt_T: np.ndarray, others: list[np.ndarray]) -> Completion:
    """What `prompt_T` gives while the engine also works on `others`."""
    futures = [
        run.engine.submit(token_T, seed=1, temperature=1.0, max_new_tokens=NUM_PROBED_TOKENS)
        for token_T in [*others, prompt_T]
    ]
    *_, completion = [future.result() for future in futures]
    return completion
