"""What the three packages say to each other: tasks, turns, trajectories, verdicts, outcomes, sandboxes.

`envs` and `verifiers` import this module and nothing else of ours; it imports numpy and the standard library only, so
that an environment worker on a CPU host never loads JAX. Everything here is frozen data, or a protocol.

Life of one episode: a `Domain` generates a `Task`; its environment plays the task in a `Sandbox`, turn by turn, against a
`Sampler`; the finished `Trajectory` carries the artifacts that were copied out; a `Verifier` judges them in a second,
clean sandbox and gives a `Verdict`; an `Outcome` says how the episode ended, and so whether it may become a reward.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

Split = Literal["train", "heldout"]
Files = Mapping[str, bytes]
"""Relative POSIX path -> content. Directories are implied by the paths of the files in them."""


# ---------------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Resources:
    """What one command or one episode may use. Every limit is enforced by the sandbox, none is advice."""

    timeout_s: float = 10.0
    """Wall time of one command."""
    cpu_s: int = 10
    """CPU time of one process (RLIMIT_CPU)."""
    memory_mb: int = 512
    """Address space of one process (RLIMIT_AS)."""
    disk_mb: int = 16
    """Size of the writable work directory."""
    file_mb: int = 8
    """Size of one file (RLIMIT_FSIZE)."""
    num_processes: int = 64
    """Processes and threads alive at once in the sandbox."""
    output_bytes: int = 16_384
    """Kept bytes of each of stdout and stderr; the rest is dropped and flagged, never buffered."""


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class ToolCall:
    """One parsed call of a tool: its name, the words after the name, and the body of the block."""

    name: str
    words: tuple[str, ...]
    body: str


@dataclass(frozen=True)
class Task:
    """One task: what the policy is told, what lies in its sandbox, and what only the verifier knows.

    `(domain, split, seed, index)` determine every byte of it. `expected` never enters the policy's sandbox.
    """

    domain: str
    kind: str
    """The generator within the domain; success is reported per domain and per kind."""
    split: Split
    seed: int
    index: int
    system: str
    """System message: the tools and how to call them. The same for all tasks of a domain, so that its prefix is shared."""
    prompt: str
    """User message: the task itself."""
    files: Files
    """What lies in the work directory at the start."""
    expected: Mapping[str, Any]
    """JSON-like data for the verifier."""
    reference: tuple[str, ...]
    """Assistant replies, one a turn, that solve the task: the cold start's demonstration and the verifier's proof."""
    max_turns: int = 1
    resources: Resources = field(default_factory=Resources)

    @property
    def id(self) -> str:
        """Unique within a run, readable in a report: `shell/count_lines/train-0-17`."""
        return f"{self.domain}/{self.kind}/{self.split}-{self.seed}-{self.index}"

    @property
    def content_digest(self) -> str:
        """SHA-256 of what the policy can see, so that the same task under two indices is recognised."""
        digest = hashlib.sha256()
        for part in (self.domain, self.system, self.prompt):
            digest.update(part.encode() + b"\0")
        for path in sorted(self.files):
            digest.update(path.encode() + b"\0" + self.files[path] + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class Domain:
    """A family of tasks and the environment that plays them: what an experiment hands to the trainer.

    `generate(split, seed, index)` is deterministic, unlimited in `index`, and never gives a task of one split in the
    other. `make_env(sandboxes)` returns a fresh `gymnasium.Env` whose `reset(options={"task": task})` starts that task.
    """

    name: str
    kinds: tuple[str, ...]
    generate: Callable[[Split, int, int], Task]
    make_env: Callable[[SandboxFactory], Any]


# --------------------------------------------------------------------------------------------------- trajectories


class StopReason(enum.Enum):
    """Why the engine stopped sampling a completion."""

    STOP = "stop"
    """The policy ended its turn (end token sampled, and part of the completion)."""
    LENGTH = "length"
    """The limit of new tokens, or of the context, was reached."""
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Completion:
    """What the engine returns for one request.

    `logprob_T` is under the distribution that was really sampled from (temperature applied). `version_T` is the policy
    version that sampled each token: a completion may span a publication.
    """

    token_T: np.ndarray
    """int32 [T], the end token included when the stop reason is STOP."""
    logprob_T: np.ndarray
    """float32 [T]."""
    version_T: np.ndarray
    """int32 [T]."""
    stop: StopReason


class Sampler(Protocol):
    """The policy as an episode sees it: token ids in, token ids out."""

    def sample(self, token_T: np.ndarray, *, seed: int) -> Completion:
        """Blocks until the completion of `token_T` (int32 [T]) is there. `seed` alone determines the randomness."""
        ...


@dataclass(frozen=True)
class Turn:
    """One exchange: the tokens that were put before the policy, the tokens it sampled, and what its call brought.

    The episode's token sequence is the concatenation of `prompt_T` and `completion` over its turns; nothing in it is
    ever decoded and tokenised again.
    """

    prompt_T: np.ndarray
    """int32 [T]: what was appended to the context before sampling (first turn: system and task)."""
    completion: Completion
    text: str
    """The completion, decoded, for people and for the tool parser."""
    call: ToolCall | None
    """None: malformed; then `observation` explains how to call a tool."""
    observation: str
    """What the policy is shown next; the last turn's is shown to nobody but kept."""


@dataclass(frozen=True)
class CommandRecord:
    """One command in a sandbox, for the episode's log."""

    argv: tuple[str, ...]
    exit_code: int | None
    """None: killed by the sandbox (see `killed_by`)."""
    wall_s: float
    cpu_s: float
    max_rss_mb: float
    stdout_digest: str
    stderr_digest: str
    stdout_excerpt: str
    stderr_excerpt: str
    killed_by: str | None
    """None, or the limit that ended it: "timeout", "cpu", "memory", "output"."""


@dataclass(frozen=True)
class Trajectory:
    """A finished episode."""

    task: Task
    episode_seed: int
    turns: tuple[Turn, ...]
    terminated: bool
    """The policy finished the task, for better or worse."""
    truncated: bool
    """A limit (turns, context) ended the episode from outside."""
    artifacts: Files
    """What the environment copied out of the sandbox for the verifier."""
    commands: tuple[CommandRecord, ...]
    sandbox_s: float
    """Seconds for which the episode held a sandbox."""

    @property
    def num_policy_tokens(self) -> int:
        return sum(len(turn.completion.token_T) for turn in self.turns)


# ------------------------------------------------------------------------------------------- verdicts and outcomes


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, said so that a person (or the policy) can act on it."""

    subject: str
    """The field, file or test: `net_income`."""
    message: str
    """`off by 1000x: scale`."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement.

    `success` is what is reported (all parts right); `reward` in [0, 1] is what is learned from, and is 1 exactly when
    `success` holds. `parts` are the pieces it is made of, by name, each in [0, 1].
    """

    reward: float
    success: bool
    parts: Mapping[str, float]
    findings: tuple[Finding, ...]
    verifier: str
    """Name and version digest of the verifier, `shell@3f9a1c2b`."""

    def __post_init__(self) -> None:
        if not (0.0 <= self.reward <= 1.0) or (self.reward == 1.0) != self.success:
            raise ValueError(
                f"verdict of {self.verifier}: reward {self.reward} with success {self.success}; "
                "the reward lies in [0, 1] and is 1 exactly when the task is solved"
            )


class Verifier(Protocol):
    """Judges a finished trajectory in a sandbox of its own; deterministic; raises `InfraError` when it can't judge."""

    def __call__(self, task: Task, artifacts: Files, sandboxes: SandboxFactory) -> Verdict: ...


@dataclass(frozen=True)
class Scored:
    """The episode ran and was judged: its reward counts."""

    verdict: Verdict


@dataclass(frozen=True)
class PolicyFault:
    """The policy broke a limit in a way that ended the episode; that is its own doing, so the reward is 0 and counts."""

    message: str


@dataclass(frozen=True)
class InfraFault:
    """Something of ours broke. No reward; excluded before any group statistic; the rate is reported."""

    stage: str
    message: str


@dataclass(frozen=True)
class TaskDefect:
    """The task itself is wrong (its generator or its reference failed). No reward; the task is quarantined."""

    message: str


@dataclass(frozen=True)
class Cancelled:
    """Stopped from outside before it could end. No reward."""

    reason: str


Outcome = Scored | PolicyFault | InfraFault | TaskDefect | Cancelled


def outcome_reward(outcome: Outcome) -> float | None:
    """The reward that counts, or None where the episode must not enter any statistic."""
    match outcome:
        case Scored(verdict):
            return verdict.reward
        case PolicyFault():
            return 0.0
        case InfraFault() | TaskDefect() | Cancelled():
            return None


class InfraError(Exception):
    """Raised by environments, sandboxes and verifiers when the fault is the infrastructure's. Becomes `InfraFault`."""


class PolicyError(Exception):
    """Raised where the policy's own act ended the episode. Becomes `PolicyFault`."""


class TaskError(Exception):
    """Raised where the task itself is at fault. Becomes `TaskDefect`."""


# ------------------------------------------------------------------------------------------------------ sandboxes


@dataclass(frozen=True)
class ExecResult:
    """How one command ended. Exactly one of `exit_code` and `killed_by` is set."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    killed_by: str | None
    """"timeout", "cpu", "memory" or "output"."""
    wall_s: float
    cpu_s: float
    max_rss_mb: float


@runtime_checkable
class Sandbox(Protocol):
    """An isolated machine with a work directory. Nothing that a policy writes runs anywhere else."""

    @property
    def commands(self) -> tuple[CommandRecord, ...]:
        """Every command so far, in order."""
        ...

    def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Runs `argv` in the work directory, stdin closed, until it and every process it started are gone."""
        ...

    def put(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file below the work directory; parents are made; never through a link."""
        ...

    def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Reads a regular file below the work directory, never through a link. FileNotFoundError when there is none."""
        ...

    def list(self) -> tuple[str, ...]:
        """Relative paths of the regular files below the work directory, sorted; links and special files left out."""
        ...

    def close(self) -> None:
        """Ends every process and removes every trace. May be called twice."""
        ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *exc: object) -> None: ...


class SandboxFactory(Protocol):
    """Makes sandboxes of one backend. Thread-safe."""

    def create(
        self, files: Files, resources: Resources | None = None, read_only: Mapping[str, Files] | None = None
    ) -> Sandbox:
        """A sandbox whose work directory holds `files`.

        `read_only` maps an absolute path inside to files that appear there and can't be written, for a verifier's own
        scripts. Raises `InfraError` when the backend can't start one.
        """
        ...


# ------------------------------------------------------------------------------------------------------- digests


def digest_json(value: Any) -> str:
    """SHA-256 (hex) of a JSON-like value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
