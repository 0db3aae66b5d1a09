"""How an episode ends is typed: faults of ours are retried and never become a reward of 0, the policy's own count."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments import toy
from postrl.contracts import (
    Completion,
    Domain,
    InfraError,
    InfraFault,
    PolicyError,
    PolicyFault,
    Scored,
    StopReason,
    TaskDefect,
    TaskError,
    Verdict,
)  # fmt: skip
from postrl.learner.batch import RowShape
from postrl.learner.group_batch import EndedEpisode, step_data
from postrl.rollout.episode import ReferenceSampler
from postrl.scheduler.collect import Collector, by_group
from postrl.scheduler.journal import Journal, JournalMismatch

CHAT = toy.byte_chat()


class ScriptedEnv:
    """An environment without a sandbox. `script(member, attempt)` says what an episode meets: an error, or None.

    The member is told from the number of environments made, so it needs one worker.
    """

    def __init__(self, error: Exception | None, where: str):
        self._error, self._where = error, where
        self.commands, self.sandbox_s, self.unwrapped = (), 0.0, self
        self.is_closed = False

    def _maybe_fail(self, where):
        if self._error is not None and self._where == where:
            raise self._error

    def reset(self, options):
        self._maybe_fail("reset")
        return options["task"].prompt, {}

    def step(self, reply):
        self._maybe_fail("step")
        return "done", 0.0, True, False, {"call": None, "artifacts": {"reply": reply.encode()}}

    def close(self):
        self.is_closed = True


class CountingSampler:
    """Samples one token; remembers the seeds."""

    def __init__(self):
        self.seeds = []

    def sample(self, token_T, *, seed):
        del token_T
        self.seeds.append(seed)
        token_T = np.array([7, CHAT.eos_id], np.int32)
        return Completion(token_T, np.full(2, -1.0, np.float32), np.full(2, 1, np.int32), StopReason.STOP)


def solved(task, artifacts, sandboxes):
    return Verdict(1.0, True, {"all": 1.0}, (), "fixed@1")


@pytest.fixture
def play(tmp_path):
    """play(errors, ...) plays one group whose k-th environment meets errors[k]; returns what is on record."""
    with Journal.open(tmp_path / "journal.db") as journal:

        def play(errors=(), *, where="step", group_size=1, verify=solved, sampler_for=None, max_attempts=3):
            script = itertools.chain(errors, itertools.repeat(None))
            play.envs = []

            def make_env(sandboxes):
                play.envs.append(ScriptedEnv(next(script), where))
                return play.envs[-1]

            domain = Domain("toy", toy.KINDS, toy.generate, make_env)
            collector = Collector({"toy": domain}, None, verify, CHAT, journal, 1, 128, max_attempts, 10)
            tasks = [toy.generate("train", 0, 0)]
            groups = journal.draw("rl", 0, tasks, group_size=group_size, run_seed=0)
            play.sampler = CountingSampler()
            return by_group(groups, collector.collect(groups, sampler_for or (lambda task: play.sampler)))[0]

        play.journal = journal
        yield play


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("index out of range"), "ValueError: index out of range"),
        (InfraError("bwrap died"), "InfraError: bwrap died"),
        (KeyError("artifacts"), "KeyError: 'artifacts'"),
        (TimeoutError(), "TimeoutError: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_breaks_every_time_is_a_fault_without_a_reward(play, error, said, where):
    (episode,) = play([error] * 3, where=where)
    assert episode.outcome == InfraFault("episode", said)
    assert (episode.attempt, episode.trajectory) == (3, None)
    assert len(play.envs) == 3
    assert play.journal.audit_counts().phases["rl"].faults == {"toy": {"episode": 3}}
    assert play.journal.audit_counts().phases["rl"].outcomes == {"toy": {"infra_fault": 1}}


def test_a_fault_is_retried_with_the_same_seed(play):
    (episode,) = play([InfraError("once"), ValueError("twice")])
    assert isinstance(episode.outcome, Scored)
    assert episode.attempt == 2
    assert play.sampler.seeds == [episode.episode.seed] * 3
    assert play.journal.num_faults(episode.episode.key) == 2


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (PolicyError("wrote 2 GB"), PolicyFault("wrote 2 GB")),
        (TaskError("the reference is wrong"), TaskDefect("the reference is wrong")),
    ],
)
def test_what_is_not_our_fault_is_not_retried(play, error, outcome, where):
    (episode,) = play([error], where=where)
    assert episode.outcome == outcome
    assert len(play.envs) == 1
    assert play.journal.num_faults(episode.episode.key) == 0


@pytest.mark.parametrize(
    ("error", "outcome", "num_calls"),
    [
        (InfraError("the check printed nothing"), InfraFault("verify", "InfraError: the check printed nothing"), 3),
        (ZeroDivisionError("division by zero"), InfraFault("verify", "ZeroDivisionError: division by zero"), 3),
        (TaskError("no expected value"), TaskDefect("no expected value"), 1),
        (PolicyError("a link of links"), PolicyFault("a link of links"), 1),
    ],
)
def test_a_verifier_that_breaks_has_no_opinion(play, error, outcome, num_calls):
    calls = []

    def verify(task, artifacts, sandboxes):
        calls.append(artifacts)
        raise error

    (episode,) = play(verify=verify)
    assert episode.outcome == outcome
    assert len(calls) == num_calls
    # What the policy did is on record, and learned from where it counts as its failure.
    assert (episode.trajectory is None) == isinstance(outcome, InfraFault)


@pytest.mark.parametrize("error", [None, InfraError("x"), PolicyError("x"), TaskError("x"), ValueError("x")])
def test_environments_are_closed_however_it_ends(play, error):
    play([error])
    assert play.envs
    assert all(env.is_closed for env in play.envs)


def test_a_demonstration_is_replayed_whole_at_the_next_attempt(play):
    """The reference starts from its first reply again, though the first attempt had used it up before it failed."""
    task = toy.generate("train", 0, 0)
    verify = fails_once(solved)
    (episode,) = play(verify=verify, sampler_for=lambda task: ReferenceSampler(CHAT, task.reference))
    assert isinstance(episode.outcome, Scored), episode.outcome
    assert episode.trajectory is not None
    assert episode.trajectory.turns[0].text == task.reference[0]


def fails_once(verify):
    calls = itertools.count()

    def flaky(task, artifacts, sandboxes):
        if next(calls) == 0:
            raise InfraError("once")
        return verify(task, artifacts, sandboxes)

    return flaky


def test_what_is_on_record_is_not_played_again(play):
    first = play([PolicyError("x")], group_size=3)
    num_played = len(play.envs)
    again = play([InfraError("never reached")] * 9, group_size=3)
    assert (num_played, len(play.envs)) == (3, 0)
    assert [e.outcome for e in again] == [e.outcome for e in first]


def test_attempts_on_record_count_after_a_restart(play):
    """A run that was killed between attempts has one fewer left."""
    key = play.journal.draw("rl", 0, [toy.generate("train", 0, 0)], group_size=1, run_seed=0)[0].episodes[0].key
    play.journal.record_fault(key, 0, "episode", "before the kill")
    (episode,) = play([InfraError("a"), InfraError("b")])
    assert episode.outcome == InfraFault("episode", "InfraError: b")
    assert len(play.envs) == 2


def test_a_contradiction_with_the_journal_stops_the_run(play, monkeypatch):
    def contradicts(*args, **kwargs):
        raise JournalMismatch("episode 3 already ended")

    monkeypatch.setattr(play.journal, "record", contradicts)
    with pytest.raises(JournalMismatch):
        play()


def test_faulted_members_do_not_shift_the_groups_baseline(play):
    """Rewards 1, 0 and a faulted third: the mean is 1/2, not 1/3, and only the two carry advantages."""
    rewards = iter([1.0, 0.0])

    def verify(task, artifacts, sandboxes):
        reward = next(rewards)
        return Verdict(reward, reward == 1.0, {"all": reward}, (), "fixed@1")

    group = play([None, None, InfraError("x")], group_size=3, verify=verify, max_attempts=1)
    assert [type(e.outcome) for e in group] == [Scored, Scored, InfraFault]
    data = step_data(
        [[EndedEpisode("toy", e.outcome, e.trajectory) for e in group]],
        normalize_std=False,
        shapes=(RowShape(128, 32),),
        max_rows=2,
    )
    rows = data.batch.rows
    assert sorted(set(rows.advantage_N[rows.mask_N].tolist())) == [-0.5, 0.5]
    assert data.metrics["reward.mean"] == 0.5
    assert (data.metrics["faults"], data.num_episodes) == (1, 3)


def test_a_policy_fault_does_shift_it(play):
    """Rewards 1, 1 and the policy's own fault: it counts as 0, so the mean is 2/3."""
    group = play([None, None, PolicyError("x")], group_size=3)
    data = step_data(
        [[EndedEpisode("toy", e.outcome, e.trajectory) for e in group]],
        normalize_std=False,
        shapes=(RowShape(128, 32),),
        max_rows=2,
    )
    rows = data.batch.rows
    np.testing.assert_allclose(sorted(set(rows.advantage_N[rows.mask_N].tolist())), [1 / 3], rtol=1e-6)
    assert data.metrics["reward.mean"] == pytest.approx(2 / 3)


def test_episodes_differ_by_their_seeds_alone(play):
    group = play(group_size=3)
    assert len(set(play.sampler.seeds)) == 3
    assert [e.trajectory.episode_seed for e in group] == [e.episode.seed for e in group]
    assert dataclasses.astuple(group[0].episode.key)[-1] == 0
