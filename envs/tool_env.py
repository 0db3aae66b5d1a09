"""The base of every environment in which a policy calls tools in a sandbox.

    env = gymnasium.make("postrl/Shell-v0")
    prompt, info = env.reset(seed=0)                     # info["system"] is the system message
    observation, reward, terminated, truncated, info = env.step("```sh\\nls\\n```")

One step is one turn: the reply's tool call is parsed (`envs.tool_calls`), run by the subclass, and answered. A reply
without a valid call is answered with an explanation and uses up its turn. `terminated`: the policy finished the task,
well or badly. `truncated`: the task's turns are used up. At the end the sandbox is gone, `info["artifacts"]` holds what
was copied out of it, and, where `verify` was given, the reward is the verdict's and `info["verdict"]` says why;
otherwise it is 0.0 and whoever plays the episode verifies the artifacts.

Faults of ours (`InfraError`, from the sandbox or the verifier) pass through and end the episode: they become neither
an observation nor a reward. A command that hits a limit is the policy's own doing and is described to it.
"""

from __future__ import annotations

import importlib
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium.error import ResetNeeded

from envs.artifacts import collect
from envs.sandbox import PutRefused, default_factory
from envs.spaces import UnicodeText
from envs.tool_calls import MAX_REPLY_CHARS, Malformed, Tool, parse_call
from postrl.contracts import CommandRecord, ExecResult, Files, Sandbox, SandboxFactory, Split, Task, ToolCall, Verifier

MAX_PROMPT_CHARS = 8_192
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_RESET_OPTIONS = {"task", "split", "seed", "index"}


@dataclass(frozen=True)
class Effect:
    """What a tool call brought: the text that the policy sees next, and whether it ended the task."""

    observation: str
    done: bool = False


class ToolEnv(gymnasium.Env[str, str]):
    """A domain as a Gymnasium environment. Subclasses set `domain`, `tools`, `generate`, and implement `act`.

    `act` runs one call in the sandbox. `begin` (optional) prepares the subclass's own state for a new episode; `record`
    (optional) names what the environment saw for itself and the verifier needs. Not thread-safe: one episode at a time.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own contract
    domain: ClassVar[str]
    tools: ClassVar[tuple[Tool, ...]]

    def __init__(
        self,
        *,
        sandboxes: SandboxFactory | None = None,
        verify: Verifier | str | None = None,
        max_observation_chars: int = 300,
        render_mode: str | None = None,
    ):
        """`sandboxes`: None means the best backend of this machine (`envs.sandbox.default_factory()`).

        `verify`: a verifier, or where to import one from ("verifiers.router:verify"); None: rewards are 0.0.
        `max_observation_chars`: longer observations lose their middle (about 3.5 characters a token).
        Raises ValueError for a malformed `verify`, a limit below 40 or an unknown `render_mode`, and InfraError when
        this machine has no sandbox.
        """
        if max_observation_chars < 40:
            raise ValueError(f"max_observation_chars is {max_observation_chars}; below 40 no observation is readable")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode is {render_mode!r}; expected None or one of {self.metadata['render_modes']}")
        self.render_mode = render_mode
        self.observation_space = UnicodeText(max(MAX_PROMPT_CHARS, max_observation_chars))
        self.action_space = UnicodeText(MAX_REPLY_CHARS)
        self.max_observation_chars = max_observation_chars
        self._sandboxes = sandboxes if sandboxes is not None else default_factory()
        self._verify = _imported(verify) if isinstance(verify, str) else verify
        self._task: Task | None = None
        self._sandbox: Sandbox | None = None
        self._commands: tuple[CommandRecord, ...] = ()
        self._sandbox_s = 0.0
        self._opened_s = 0.0
        self._num_turns = 0
        self._transcript: list[str] = []

    # ------------------------------------------------------------------------------------ what a subclass provides

    @staticmethod
    @abstractmethod
    def generate(split: Split, seed: int, index: int) -> Task:
        """The domain's task of that name; see `postrl.contracts.Domain.generate`."""

    @abstractmethod
    def act(self, call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
        """Runs one well-formed call. Raises InfraError when the sandbox fails."""

    def begin(self, task: Task) -> None:
        """Forgets what the subclass remembers of the previous episode. Called by every reset."""
        return

    def record(self) -> Files:
        """What the environment saw itself, for the verifier; names without a slash (`stdout`)."""
        return {}

    # --------------------------------------------------------------------------------------------- Gymnasium's API

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts a task; returns its prompt and `{"system", "task_id"}`.

        `options`: `{"task": Task}`, or `{"split", "index"}` with or without `"seed"` (the generator's, 0 if left out),
        or nothing, which draws a training task from the environment's own random numbers, so that `seed` decides it.
        Raises ValueError for other options and InfraError when no sandbox can be made.
        """
        super().reset(seed=seed)
        self.close()
        task = self._chosen(options or {})
        self.begin(task)
        self._commands, self._sandbox_s, self._num_turns = (), 0.0, 0
        self._transcript = [f"system: {task.system}", f"user: {task.prompt}"]
        self._opened_s = time.monotonic()
        self._sandbox = self._sandboxes.create(task.files, task.resources)
        self._task = task
        return task.prompt, {"system": task.system, "task_id": task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one reply. `info["call"]` is the parsed call, or None for a malformed reply.

        A file that can't be written because of what the policy did (a full disk, a directory in its place) is an
        observation. Raises ResetNeeded when no episode is under way, and lets InfraError and other PolicyErrors through
        after closing the sandbox.
        """
        task, sandbox = self._task, self._sandbox
        if task is None or sandbox is None:
            raise ResetNeeded("no episode is under way: call reset() first (an episode also ends by an error)")
        try:
            self._num_turns += 1
            call = parse_call(action, self.tools)
            effect = Effect(call.explanation) if isinstance(call, Malformed) else self._acted(call, task, sandbox)
            observation = clip(effect.observation, self.max_observation_chars)
            self._transcript += [f"assistant: {action}", f"user: {observation}"]
            terminated = effect.done
            truncated = not terminated and self._num_turns >= task.max_turns
            info: dict[str, Any] = {"call": None if isinstance(call, Malformed) else call}
            reward = 0.0
            if terminated or truncated:
                info |= self.finish()
                if "verdict" in info:
                    reward = float(info["verdict"].reward)
        except BaseException:
            self.close()
            raise
        return observation, reward, terminated, truncated, info

    def finish(self) -> dict[str, Any]:
        """Ends the episode as it stands: `{"artifacts"}`, and `"verdict"` where there is a verifier.

        `step` calls it at the end. A player whose context is full calls it itself, which truncates the episode.
        """
        task, sandbox = self._task, self._sandbox
        if task is None or sandbox is None:
            raise ResetNeeded("no episode is under way: call reset() first")
        info: dict[str, Any] = {"artifacts": collect(sandbox, self.record())}
        self.close()
        if self._verify is not None:
            info["verdict"] = self._verify(task, info["artifacts"], self._sandboxes)
        return info

    def render(self) -> str | None:
        """The episode so far as plain text, with `render_mode="ansi"`."""
        return "\n\n".join(self._transcript) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Ends the sandbox, if there is one. The log of commands and the seconds stay readable until the next reset."""
        sandbox, self._sandbox, self._task = self._sandbox, None, None
        if sandbox is not None:
            self._commands = sandbox.commands
            sandbox.close()
            self._sandbox_s = time.monotonic() - self._opened_s

    # ---------------------------------------------------------------------------------------- for the episode's log

    @property
    def commands(self) -> tuple[CommandRecord, ...]:
        """Every command of the running episode, or of the last one."""
        return self._commands if self._sandbox is None else self._sandbox.commands

    @property
    def sandbox_s(self) -> float:
        """Seconds for which the running episode, or the last one, held its sandbox."""
        return self._sandbox_s if self._sandbox is None else time.monotonic() - self._opened_s

    def _acted(self, call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
        try:
            return self.act(call, task, sandbox)
        except PutRefused as refusal:  # what the policy did earlier is in the way: it reads so, and may clear it
            return Effect(f"{refusal.filename} was not written: {refusal.strerror}")

    def _chosen(self, options: Mapping[str, Any]) -> Task:
        unknown = set(options) - _RESET_OPTIONS
        if unknown or ("task" in options and len(options) > 1) or (("split" in options) != ("index" in options)):
            raise ValueError(
                f"reset options {sorted(options)}: expected 'task' alone, or 'split' and 'index' "
                "(and 'seed' if it isn't 0), or none"
            )
        if "task" in options:
            task = options["task"]
            if not isinstance(task, Task) or task.domain != self.domain:
                given = task.id if isinstance(task, Task) else repr(task)[:80]
                raise ValueError(f"reset options['task'] is {given}; expected a Task of the domain {self.domain!r}")
            return task
        if "split" in options:
            return self.generate(options["split"], int(options.get("seed", 0)), int(options["index"]))
        return self.generate("train", int(options.get("seed", 0)), int(self.np_random.integers(2**31)))


def clip(text: str, max_chars: int) -> str:
    """`text`, or its beginning and end around a mark that counts what was cut: at most `max_chars` characters."""
    if len(text) <= max_chars:
        return text
    room = max_chars - len(f"\n[{len(text)} characters cut]\n")
    head, tail = room - room // 2, room // 2
    return f"{text[:head]}\n[{len(text) - room} characters cut]\n{text[len(text) - tail :]}"


def describe(result: ExecResult, timeout_s: float) -> str:
    """A finished command in words: `exit 1`, then stderr and stdout; or `killed: timeout after 10 s`; or `(no output)`.

    Bytes that aren't UTF-8 and control characters become U+FFFD.
    """
    lines = []
    if result.killed_by is not None:
        after = f" after {timeout_s:g} s" if result.killed_by == "timeout" else ""
        lines.append(f"killed: {result.killed_by}{after}")
    elif result.exit_code != 0:
        lines.append(f"exit {result.exit_code}")
    streams = (stream.decode(errors="replace") for stream in (result.stderr, result.stdout))
    lines += [_CONTROL.sub("\ufffd", text).strip("\n") for text in streams]
    return "\n".join(line for line in lines if line) or "(no output)"


def _imported(where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    if not module or not name:
        raise ValueError(f"verify is {where!r}; expected 'module:function', such as 'verifiers.router:verify'")
    verify = getattr(importlib.import_module(module), name, None)
    if not callable(verify):
        raise ValueError(f"verify is {where!r}, but {module} has no function {name!r}")
    return verify
