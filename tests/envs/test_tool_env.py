"""The environment base, on a sandbox that exists in memory only: turns, endings, artifacts, faults, limits."""

import dataclasses
import json
from typing import ClassVar

import gymnasium
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.artifacts import MAX_FILES, MAX_TOTAL_BYTES, collect
from envs.tool_calls import Tool
from envs.tool_env import Effect, ToolEnv, clip, describe
from postrl.contracts import ExecResult, InfraError, PolicyError, Task, ToolCall, Verdict

TASK = Task("echo", "say", "train", 0, 7, "SYSTEM", "PROMPT", {"a.txt": b"a\n"}, {}, ("```say\nhi\n```",), max_turns=3)


class MemorySandbox:
    def __init__(self, files):
        self.files, self.commands, self.num_closed = dict(files), (), 0

    def list(self):
        return tuple(sorted(self.files))

    def get(self, path, max_bytes=1 << 20):
        if self.files[path] is None:
            raise PermissionError(path)
        return self.files[path][:max_bytes]

    def close(self):
        self.num_closed += 1


class MemoryFactory:
    def __init__(self):
        self.made = []

    def create(self, files, resources=None, read_only=None):
        self.made.append(MemorySandbox(files))
        return self.made[-1]


class EchoEnv(ToolEnv):
    domain = "echo"
    tools: ClassVar = (Tool("say"), Tool("stop"), Tool("break"))

    @staticmethod
    def generate(split, seed, index):
        return dataclasses.replace(TASK, split=split, seed=seed, index=index)

    def act(self, call, task, sandbox):
        if call.name == "break":
            raise {"infra": InfraError, "policy": PolicyError, "bug": KeyError}[call.body](call.body)
        sandbox.files["said.txt"] = call.body.encode()
        return Effect(f"said {call.body}", done=call.name == "stop")

    def record(self):
        return {"note": b"seen"}


def say(text, tool="say"):
    return f"```{tool}\n{text}\n```"


@pytest.fixture
def env():
    return EchoEnv(sandboxes=MemoryFactory())


def test_an_episode_that_the_policy_finishes(env):
    assert env.reset(options={"task": TASK}) == ("PROMPT", {"system": "SYSTEM", "task_id": "echo/say/train-0-7"})
    assert env.step(say("one")) == ("said one", 0.0, False, False, {"call": ToolCall("say", (), "one")})
    observation, reward, terminated, truncated, info = env.step(say("two", tool="stop"))
    assert (observation, reward, terminated, truncated) == ("said two", 0.0, True, False)
    assert info == {
        "call": ToolCall("stop", (), "two"),
        "artifacts": {"note": b"seen", "work/a.txt": b"a\n", "work/said.txt": b"two"},
    }
    assert [sandbox.num_closed for sandbox in env._sandboxes.made] == [1]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(say("three"))


def test_truncated_means_that_the_turns_are_used_up_and_malformed_replies_use_turns(env):
    env.reset(options={"task": TASK})
    explanation = "No tool call: use ```say or ```stop or ```break."
    assert env.step("hello") == (explanation, 0.0, False, False, {"call": None})
    env.step(say("one"))
    observation, _, terminated, truncated, info = env.step("hello")
    assert (observation, terminated, truncated, info["call"]) == (explanation, False, True, None)
    assert info["artifacts"]["work/said.txt"] == b"one"


def test_finishing_on_the_last_turn_is_termination_not_truncation(env):
    env.reset(options={"task": dataclasses.replace(TASK, max_turns=1)})
    _, _, terminated, truncated, _ = env.step(say("x", tool="stop"))
    assert (terminated, truncated) == (True, False)


def test_the_verdict_is_the_final_reward():
    seen = []

    def verify(task, artifacts, sandboxes):
        seen.append((task.id, dict(artifacts)))
        return Verdict(0.25, False, {"a": 0.25}, (), "echo@00000000")

    env = EchoEnv(sandboxes=MemoryFactory(), verify=verify)
    env.reset(options={"task": TASK})
    assert env.step(say("x"))[1] == 0.0
    assert not seen
    _, reward, _, _, info = env.step(say("x", tool="stop"))
    assert (reward, info["verdict"].reward) == (0.25, 0.25)
    assert seen == [("echo/say/train-0-7", info["artifacts"])]


@pytest.mark.parametrize(("fault", "error"), [("infra", InfraError), ("policy", PolicyError), ("bug", KeyError)])
def test_faults_pass_through_and_end_the_episode(env, fault, error):
    env.reset(options={"task": TASK})
    with pytest.raises(error):
        env.step(say(fault, tool="break"))
    assert env._sandboxes.made[0].num_closed == 1
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(say("x"))


def test_a_verifier_that_fails_is_no_reward(env):
    def verify(task, artifacts, sandboxes):
        raise InfraError("the verifier's sandbox died")

    env = EchoEnv(sandboxes=MemoryFactory(), verify=verify)
    env.reset(options={"task": TASK})
    with pytest.raises(InfraError, match="the verifier's sandbox died"):
        env.step(say("x", tool="stop"))


def test_reset_chooses_the_task(env):
    task_id = lambda **kwargs: env.reset(**kwargs)[1]["task_id"]  # noqa: E731
    assert task_id(options={"split": "heldout", "index": 4}) == "echo/say/heldout-0-4"
    assert task_id(options={"split": "train", "index": 4, "seed": 9}) == "echo/say/train-9-4"
    drawn = task_id(seed=5)
    assert drawn.startswith("echo/say/train-0-")
    assert task_id() != drawn
    assert task_id(seed=5, options={}) == drawn
    assert all(sandbox.num_closed == 1 for sandbox in env._sandboxes.made[:-1])
    env.close()
    env.close()
    assert env._sandboxes.made[-1].num_closed == 1


@pytest.mark.parametrize(
    "options",
    [
        {"tsak": TASK},
        {"task": TASK, "index": 1},
        {"split": "train"},
        {"index": 3},
        {"task": "shell/x"},
        {"task": dataclasses.replace(TASK, domain="other")},
    ],
)
def test_reset_refuses_other_options(env, options):
    with pytest.raises(ValueError, match="expected"):
        env.reset(options=options)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"verify": "verifiers.router"}, "expected 'module:function'"),
        ({"verify": "json:nothing"}, "json has no function 'nothing'"),
        ({"max_observation_chars": 10}, "below 40"),
        ({"render_mode": "human"}, "expected None or one of"),
    ],
)
def test_constructor_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        EchoEnv(sandboxes=MemoryFactory(), **kwargs)


def test_rendering_is_the_transcript():
    env = EchoEnv(sandboxes=MemoryFactory(), render_mode="ansi")
    env.reset(options={"task": TASK})
    env.step(say("hi"))
    assert env.render() == "system: SYSTEM\n\nuser: PROMPT\n\nassistant: ```say\nhi\n```\n\nuser: said hi"


def test_seconds_and_commands_outlive_the_sandbox(env):
    env.reset(options={"task": TASK})
    assert env.sandbox_s > 0
    env.step(say("x", tool="stop"))
    held = env.sandbox_s
    assert held == env.sandbox_s > 0
    assert env.commands == ()


def test_observations_are_cut_to_their_limit():
    env = EchoEnv(sandboxes=MemoryFactory(), max_observation_chars=60)
    env.reset(options={"task": TASK})
    observation, *_ = env.step(say("x" * 500))
    assert observation == "said " + "x" * 14 + "\n[467 characters cut]\n" + "x" * 19


@given(st.text(max_size=300), st.integers(40, 200))
def test_clip(text, limit):
    clipped = clip(text, limit)
    assert len(clipped) <= limit
    assert clipped == text or (len(text) > limit and "characters cut]" in clipped)


def result(**kwargs):
    known = {"exit_code": 0, "stdout": b"", "stderr": b"", "stdout_truncated": False, "stderr_truncated": False}
    return ExecResult(**{**known, "killed_by": None, "wall_s": 0.1, "cpu_s": 0.1, "max_rss_mb": 1.0, **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"stdout": b"3\n"}, "3"),
        ({}, "(no output)"),
        ({"exit_code": 2, "stdout": b"out\n", "stderr": b"err\n"}, "exit 2\nerr\nout"),
        ({"exit_code": 1}, "exit 1"),
        ({"exit_code": None, "killed_by": "timeout", "stdout": b"a"}, "killed: timeout after 10 s\na"),
        ({"exit_code": None, "killed_by": "memory"}, "killed: memory"),
        ({"stdout": b"\xff\x00\x1b[1m\xc3\xa4\tb"}, "\ufffd\ufffd\ufffd[1m\u00e4\tb"),
    ],
)
def test_describe(kwargs, text):
    assert describe(result(**kwargs), timeout_s=10.0) == text


def left_out(files):
    return json.loads(collect(MemorySandbox(files), {}).get("left_out", b"[]"))


def test_artifacts_keep_what_the_environment_saw_apart_from_the_policys_files():
    files = {"stdout": b"forged", "left_out": b"forged", "work/stdout": b"forged"}
    assert collect(MemorySandbox(files), {"stdout": b"real"}) == {
        "stdout": b"real",
        "work/left_out": b"forged",
        "work/stdout": b"forged",
        "work/work/stdout": b"forged",
    }


def test_artifacts_are_bounded_and_say_what_is_missing():
    assert left_out({"a": b"x" * MAX_TOTAL_BYTES}) == []
    assert left_out({"a": b"x" * MAX_TOTAL_BYTES, "b": b"y"}) == ["1 files left out", "'b': over 1048576 bytes in all"]
    assert left_out({str(i): b"" for i in range(MAX_FILES)}) == []
    assert left_out({f"{i:03d}": b"" for i in range(200)})[:2] == ["136 files left out", "'064': over 64 files"]
    assert len(left_out({f"{i:03d}": b"" for i in range(200)})) == 9
    assert left_out({"locked": None}) == ["1 files left out", "'locked': unreadable (PermissionError)"]
    assert left_out({"bad\udcff": b""}) == ["1 files left out", "'bad\\udcff': the name is not UTF-8"]
    assert "longer than 200 bytes" in left_out({"a/" * 8 + "b": b""})[1]
    assert "longer than 200 bytes" in left_out({"ä" * 101: b""})[1]
