"""The `shell` domain: one-command tasks with real coreutils, grep, sed, awk and find in a real bash.

Tools: `look` runs its script with bash in the work directory, shows the output and goes on; `sh` runs it too and ends the
episode. What counts is the stdout of `sh` and the files afterwards, each as far as the kind says.
"""

from __future__ import annotations

import functools

import numpy as np

from envs.shell.kinds import KINDS
from envs.splits import draw
from envs.tool_calls import Tool
from envs.tool_env import Effect, ToolEnv, describe
from postrl.contracts import Domain, Files, Resources, Sandbox, Split, Task, ToolCall

SYSTEM = (
    "You use a Linux shell. Answer with one command in a block:\n```sh\nls\n```\n"
    "To look around first, write ```look instead of ```sh."
)
RESOURCES = Resources(timeout_s=5.0, cpu_s=5, memory_mb=256, disk_mb=8, file_mb=4, num_processes=32)
MAX_TURNS = 3

_NAMES = tuple(KINDS)


def generate(split: Split, seed: int, index: int) -> Task:
    """The task of that name. Kinds take turns by index, so that any eight in a row hold each once."""
    kind = _NAMES[index % len(_NAMES)]
    return draw("shell", split, seed, index, functools.partial(_make, kind, split, seed, index), by_prompt=True)


def _make(kind: str, split: Split, seed: int, index: int, rng: np.random.Generator) -> Task:
    problem = KINDS[kind](rng)
    return Task(
        domain="shell",
        kind=kind,
        split=split,
        seed=seed,
        index=index,
        system=SYSTEM,
        prompt=problem.prompt,
        files={path: text.encode() for path, text in problem.files.items()},
        expected={"stdout": problem.stdout, "number": problem.number, "changes": dict(problem.changes)},
        reference=(f"```sh\n{problem.command}\n```",),
        max_turns=MAX_TURNS,
        resources=RESOURCES,
    )


class ShellEnv(ToolEnv):
    """Plays shell tasks; see the module's description for its tools and `ToolEnv` for the rest."""

    domain = "shell"
    tools = (Tool("sh"), Tool("look"))
    generate = staticmethod(generate)

    def begin(self, task: Task) -> None:
        self._stdout = b""

    def act(self, call: ToolCall, task: Task, sandbox: Sandbox) -> Effect:
        result = sandbox.exec(["bash", "-c", call.body])
        if call.name == "sh":
            self._stdout = result.stdout
        return Effect(describe(result, task.resources.timeout_s), done=call.name == "sh")

    def record(self) -> Files:
        return {"stdout": self._stdout}


DOMAIN = Domain("shell", _NAMES, generate, lambda sandboxes: ShellEnv(sandboxes=sandboxes))
