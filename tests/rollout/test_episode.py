"""One episode with a scripted environment and policy: the tokens that were seen are the tokens that are kept."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from postrl.contracts import Completion, InfraError, Message, StopReason, ToolCall
from postrl.rollout.episode import ReferenceSampler, run_episode
from tests.policy.tiny import tiny_chat
from tests.sample_episodes import sample_task

CHAT = tiny_chat()
TASK = sample_task()
CALL = ToolCall("sh", (), "ls")


class ScriptedEnv:
    """Answers the replies it expects with (observation, terminated, truncated)."""

    def __init__(self, script):
        self.script, self.replies, self.closed, self.finished = list(script), [], 0, 0
        self.commands, self.sandbox_s = ("command",), 1.5
        self.unwrapped = self

    def reset(self, *, options):
        assert options == {"task": TASK}
        return "The task.", {}

    def step(self, reply):
        observation, terminated, truncated = self.script[len(self.replies)]
        self.replies.append(reply)
        info = {"call": CALL if reply else None, "artifacts": {"seen": str(len(self.replies)).encode()}}
        return observation, 0.0, terminated, truncated, info

    def finish(self):
        self.finished += 1
        return {"artifacts": {"finished": b"yes"}}

    def close(self):
        self.closed += 1


@dataclass
class ScriptedSampler:
    """Replies from a list of (text, stop reason); keeps every context and seed it was asked with."""

    replies: list
    asked: list = field(default_factory=list)

    def sample(self, token_T, *, seed):
        self.asked.append(SimpleNamespace(token_T=np.array(token_T), seed=seed))
        text, stop = self.replies[len(self.asked) - 1]
        token_T = CHAT.encode_reply(text) if stop is StopReason.STOP else CHAT.encode_reply(text)[:-1]
        num = len(token_T)
        return Completion(token_T, -np.arange(1, num + 1, dtype=np.float32), np.full(num, 3, np.int32), stop)


def play(env, sampler, max_context=10_000, max_turns=10):
    return run_episode(TASK, env, sampler, CHAT, seed=100, max_context=max_context, max_turns=max_turns)


def test_the_turns_concatenate_to_what_the_sampler_saw():
    env = ScriptedEnv([("two files", False, False), ("hm?", False, False), ("bye", True, False)])
    sampler = ScriptedSampler([("ls", StopReason.STOP), ("", StopReason.STOP), ("done", StopReason.STOP)])
    trajectory = play(env, sampler)
    seen = np.zeros(0, np.int32)
    assert len(trajectory.turns) == len(sampler.asked) == 3
    for k, (turn, asked) in enumerate(zip(trajectory.turns, sampler.asked, strict=True)):
        seen = np.concatenate([seen, turn.prompt_T])
        np.testing.assert_array_equal(asked.token_T, seen)
        seen = np.concatenate([seen, turn.completion.token_T])
        assert asked.seed == 100 + k
    opening = CHAT.opening((Message("system", TASK.system), Message("user", "The task.")))
    np.testing.assert_array_equal(trajectory.turns[0].prompt_T, opening)
    np.testing.assert_array_equal(trajectory.turns[1].prompt_T, CHAT.continuation(True, "two files"))
    assert env.replies == [turn.text for turn in trajectory.turns] == ["ls", "", "done"]
    assert [turn.call for turn in trajectory.turns] == [CALL, None, CALL]
    assert [turn.observation for turn in trajectory.turns] == ["two files", "hm?", "bye"]
    assert (trajectory.terminated, trajectory.truncated) == (True, False)
    assert trajectory.artifacts == {"seen": b"3"}
    assert (trajectory.commands, trajectory.sandbox_s) == (("command",), 1.5)
    assert (trajectory.task, trajectory.episode_seed) == (TASK, 100)
    assert (env.closed, env.finished) == (1, 0)


@pytest.mark.parametrize("stop", [StopReason.STOP, StopReason.LENGTH])
def test_every_reply_ends_with_exactly_one_end_token(stop):
    """A sampled end token is the completion's; a reply cut by length gets one in the next prompt: no loss token."""
    env = ScriptedEnv([("go on", False, False), ("", True, False)])
    sampler = ScriptedSampler([("some", stop), ("thing", StopReason.STOP)])
    first, second = play(env, sampler).turns
    assert int(np.sum(first.completion.token_T == CHAT.eos_id)) == (stop is StopReason.STOP)
    joined = np.concatenate([first.prompt_T, first.completion.token_T, second.prompt_T])
    observation = "go on" if stop is StopReason.STOP else "Cut after 4 tokens and not run: be shorter."
    whole = (
        f"<|im_start|>system\n{TASK.system}<|im_end|>\n<|im_start|>user\nThe task.<|im_end|>\n<|im_start|>assistant\n"
        f"some<|im_end|>\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert joined.tolist() == CHAT.tokenizer.encode(whole, add_special_tokens=False).ids
    np.testing.assert_array_equal(sampler.asked[1].token_T, joined)


def test_a_reply_that_was_cut_is_not_acted_on():
    """The environment gets no text and so no call; the record keeps what was sampled and what the policy read."""
    env = ScriptedEnv([("No tool call: use ```sh.", False, False), ("", True, False)])
    cut = "```sh\nrm -r src"
    first, second = play(env, ScriptedSampler([(cut, StopReason.LENGTH), ("ls", StopReason.STOP)])).turns
    assert env.replies == ["", "ls"]
    told = f"Cut after {len(cut)} tokens and not run: be shorter."
    assert (first.text, first.call, first.observation) == (cut, None, told)
    np.testing.assert_array_equal(second.prompt_T, CHAT.continuation(False, told))
    assert second.call == CALL


def test_the_environment_may_truncate():
    env = ScriptedEnv([("turns are up", False, True)])
    trajectory = play(env, ScriptedSampler([("ls", StopReason.STOP)]))
    assert (trajectory.terminated, trajectory.truncated) == (False, True)
    assert (trajectory.artifacts, env.finished) == ({"seen": b"1"}, 0)


def test_a_context_that_would_overflow_is_truncated():
    """The second prompt would reach the limit: the environment hands its artifacts over, nothing more is sampled."""
    opening = CHAT.opening((Message("system", TASK.system), Message("user", "The task.")))
    used = len(opening) + len(CHAT.encode_reply("ls")) + len(CHAT.continuation(True, "x" * 50))
    for max_context, num_turns in ((used, 1), (used + 1, 2)):
        env = ScriptedEnv([("x" * 50, False, False), ("", True, False)])
        sampler = ScriptedSampler([("ls", StopReason.STOP), ("done", StopReason.STOP)])
        trajectory = play(env, sampler, max_context)
        assert len(trajectory.turns) == len(sampler.asked) == num_turns
        assert (trajectory.terminated, trajectory.truncated) == (num_turns == 2, num_turns == 1)
        assert trajectory.artifacts == ({"finished": b"yes"} if num_turns == 1 else {"seen": b"2"})
        assert (env.finished, env.closed) == (int(num_turns == 1), 1)


@pytest.mark.parametrize("max_turns", [1, 2])
def test_a_run_may_allow_fewer_turns_than_the_task(max_turns):
    """The environment hands over its artifacts early, unless it ended by itself in the last turn that was allowed."""
    env = ScriptedEnv([("go on", False, False), ("", True, False)])
    sampler = ScriptedSampler([("ls", StopReason.STOP), ("done", StopReason.STOP)])
    trajectory = play(env, sampler, max_turns=max_turns)
    assert len(trajectory.turns) == len(sampler.asked) == max_turns
    assert (trajectory.terminated, trajectory.truncated) == (max_turns == 2, max_turns == 1)
    assert trajectory.artifacts == ({"finished": b"yes"} if max_turns == 1 else {"seen": b"2"})
    assert (env.finished, env.closed) == (int(max_turns == 1), 1)


@pytest.mark.parametrize("where", ["reset", "step", "sample"])
def test_a_fault_closes_the_environment_and_passes_through(where):
    env = ScriptedEnv([("", True, False)])
    sampler = ScriptedSampler([("ls", StopReason.STOP)])

    def fail(*_, **__):
        raise InfraError("sandbox died")

    setattr(sampler if where == "sample" else env, where, fail)
    with pytest.raises(InfraError, match="sandbox died"):
        play(env, sampler)
    assert env.closed == 1


def test_references_are_replayed_as_the_policy_would_have_sampled_them():
    env = ScriptedEnv([("more", False, False), ("", True, False)])
    trajectory = play(env, ReferenceSampler(CHAT, ("first <|im_end|> reply", "second")))
    assert env.replies == ["first <|im_end|> reply", "second"]
    for turn, text in zip(trajectory.turns, env.replies, strict=True):
        completion = turn.completion
        np.testing.assert_array_equal(completion.token_T, CHAT.encode_reply(text))
        assert completion.stop is StopReason.STOP
        assert np.isnan(completion.logprob_T).all()  # nothing may form a ratio with them
        assert (completion.version_T == -1).all()
    np.testing.assert_array_equal(trajectory.turns[1].prompt_T, CHAT.continuation(True, "more"))
