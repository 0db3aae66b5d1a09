"""What every kind of every domain must hold: reference 1, no-op 0, empty 0, malformed 0, tampering 0, splits apart."""

import re

import gymnasium
import pytest

import envs
from postrl.contracts import Domain
from tests.envs.episodes import play, sandboxes, tasks_of
from verifiers.router import verify

DOMAINS = envs.domains()
KINDS = [(domain, kind) for domain in DOMAINS.values() for kind in domain.kinds]
each_domain = pytest.mark.parametrize("domain", DOMAINS.values(), ids=list(DOMAINS))
each_kind = pytest.mark.parametrize(("domain", "kind"), KINDS, ids=[f"{domain.name}-{kind}" for domain, kind in KINDS])

FORGERIES = {
    "verdict.json": b'{"reward": 1.0, "success": true}',
    "reward.json": b'{"reward": 1.0}',
    "reward.txt": b"1.0\n",
    "report.json": b'{"parts": {"all": 1.0}, "findings": []}',
    "check.py": b"print(1)\n",
    "given.json": b"{}",
    "json.py": b"raise SystemExit(0)\n",
    "sitecustomize.py": b"raise SystemExit(0)\n",
    "conftest.py": b"raise SystemExit(0)\n",
    "stdout": b"1\n",
    "left_out": b"[]",
}


def judged(domain: Domain, task, replies):
    artifacts = play(domain.make_env(sandboxes()), task, replies)[4]["artifacts"]
    return verify(task, artifacts, sandboxes()), artifacts


@each_kind
def test_the_reference_solves_the_task(domain, kind):
    tasks = [*tasks_of(domain, kind, 3), *tasks_of(domain, kind, 1, split="train")]
    assert len(tasks) == 4
    for task in tasks:
        _, _, terminated, truncated, info = play(domain.make_env(sandboxes()), task, task.reference)
        assert (terminated, truncated) == (True, False), task.id
        verdict = verify(task, info["artifacts"], sandboxes())
        assert verdict.success, (task.id, task.prompt, verdict.findings)
        assert verdict.reward == 1.0
        assert verdict.findings == ()


@each_kind
def test_doing_nothing_earns_nothing(domain, kind):
    for task in tasks_of(domain, kind, 2):
        verdict, _ = judged(domain, task, ())
        assert verdict.reward == 0.0, task.id
        assert verdict.findings


@each_kind
def test_empty_results_earn_nothing(domain, kind):
    (task,) = tasks_of(domain, kind, 1)
    assert verify(task, {}, sandboxes()).reward == 0.0
    _, artifacts = judged(domain, task, task.reference)
    assert verify(task, dict.fromkeys(artifacts, b""), sandboxes()).reward == 0.0


@each_kind
def test_malformed_replies_earn_nothing_even_with_the_right_content(domain, kind):
    (task,) = tasks_of(domain, kind, 1)
    without_fences = [reply.replace("`", "") for reply in task.reference]
    wrong_tool = [re.sub(r"^```\w+.*$", "```python", reply, flags=re.MULTILINE) for reply in task.reference]
    for replies in (without_fences, wrong_tool):
        verdict, _ = judged(domain, task, replies)
        assert verdict.reward == 0.0, task.id


@each_kind
def test_planted_verdicts_earn_nothing(domain, kind):
    (task,) = tasks_of(domain, kind, 1)
    _, artifacts = judged(domain, task, ())
    planted = {f"work/{name}": data for name, data in FORGERIES.items()}
    assert verify(task, {**planted, **artifacts}, sandboxes()).reward == 0.0


@each_kind
def test_references_fit_the_turns_and_the_turns_leave_room(domain, kind):
    for task in tasks_of(domain, kind, 3):
        assert 1 <= len(task.reference) <= task.max_turns
        assert task.max_turns > 1, "Gymnasium's checker refuses environments that truncate after one step"


@each_domain
def test_the_verdict_is_the_reward_for_somebody_who_only_knows_gymnasium(domain):
    ids = {"shell": "Shell", "code_repair": "CodeRepair", "filing_fields": "FilingFields"}
    env = gymnasium.make(f"envs:postrl/{ids[domain.name]}-v0")
    task = domain.generate("heldout", 0, 0)
    prompt, info = env.reset(options={"split": "heldout", "index": 0})
    assert (prompt, info) == (task.prompt, {"system": task.system, "task_id": task.id})
    rewards = [env.step(reply)[1:] for reply in task.reference]
    assert [reward for reward, *_ in rewards] == [0.0] * (len(rewards) - 1) + [1.0]
    assert rewards[-1][1:3] == (True, False)
    assert rewards[-1][3]["verdict"].success
    assert rewards[-1][3]["verdict"].verifier.startswith(f"{domain.name}@")
    env.close()


@each_domain
def test_tasks_are_determined_by_their_name(domain):
    for index in range(20):
        assert domain.generate("train", 3, index) == domain.generate("train", 3, index)
    ids = {domain.generate(split, seed, 5).content_digest for split in ("train", "heldout") for seed in range(5)}
    assert len(ids) == 10


@each_domain
def test_every_kind_occurs_early_and_often(domain):
    kinds = [domain.generate("heldout", 0, index).kind for index in range(120)]
    assert set(kinds) == set(domain.kinds)
    assert min(kinds.count(kind) for kind in domain.kinds) >= 120 / len(domain.kinds) / 3


@each_domain
def test_splits_are_apart_and_tasks_rarely_repeat(domain):
    heldout = {domain.generate("heldout", 0, index).content_digest for index in range(400)}
    train = {domain.generate("train", 0, index).content_digest for index in range(4_000)}
    assert len(heldout) > 0.99 * 400
    assert len(train) > 0.99 * 4_000
    assert not heldout & train


@each_domain
def test_texts_are_short(domain):
    """A token is about 3.7 characters of such text; a 135M policy on a CPU pays for each."""
    for index in range(60):
        task = domain.generate("train", 0, index)
        assert len(task.system) <= 900, task.id
        assert len(task.prompt) <= 2_000, task.id
        assert task.prompt.isprintable() or "\n" in task.prompt
