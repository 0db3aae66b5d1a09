"""Tasks and trajectories whose every byte follows from a few numbers, for tests of what a run writes."""

from __future__ import annotations

import numpy as np

from postrl.contracts import (
    CommandRecord,
    Completion,
    Finding,
    InfraFault,
    Outcome,
    PolicyFault,
    Scored,
    Split,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    Verdict,
)


def sample_task(index: int = 0, *, domain: str = "shell", kind: str = "count_lines", split: Split = "train") -> Task:
    return Task(
        domain=domain,
        kind=kind,
        split=split,
        seed=0,
        index=index,
        system=f"You work in {domain}.",
        prompt=f"Count the lines of file{index}.txt.",
        files={f"file{index}.txt": b"a\nb\n" * (index + 1)},
        expected={"lines": 2 * (index + 1)},
        reference=(f"wc -l file{index}.txt",),
        max_turns=2,
    )


def sample_trajectory(task: Task, episode_seed: int, *, num_turns: int = 2, text: str = "wc -l") -> Trajectory:
    """`num_turns` turns with tokens drawn from `episode_seed`; the last turn's call is malformed."""
    rng = np.random.default_rng(episode_seed)
    turns = []
    for index in range(num_turns):
        num_sampled = int(rng.integers(1, 6))
        completion = Completion(
            token_T=rng.integers(0, 49_152, num_sampled).astype(np.int32),
            logprob_T=-rng.exponential(size=num_sampled).astype(np.float32),
            version_T=np.full(num_sampled, index, np.int32),
            stop=StopReason.LENGTH if index == num_turns - 1 else StopReason.STOP,
        )
        turns.append(
            Turn(
                prompt_T=rng.integers(0, 49_152, int(rng.integers(1, 9))).astype(np.int32),
                completion=completion,
                text=f"{text} {index}",
                call=None if index == num_turns - 1 else ToolCall("run", ("fast",), f"{text} {index}"),
                observation=f"observation {index}",
            )
        )
    return Trajectory(
        task=task,
        episode_seed=episode_seed,
        turns=tuple(turns),
        terminated=True,
        truncated=False,
        artifacts={"out.txt": b"2\n", "bin/raw": bytes(range(256))},
        commands=(CommandRecord(("sh", "-c", text), 0, 0.25, 0.125, 3.5, "aa", "bb", "2", "", None),),
        sandbox_s=0.5,
    )


def sample_outcome(episode_seed: int) -> Outcome:
    """Mostly scored: a third solved, a third half right, and of the rest every other one broken."""
    match episode_seed % 6:
        case 0 | 3:
            return Scored(Verdict(1.0, True, {"lines": 1.0}, (), "shell@1"))
        case 1 | 4:
            finding = Finding("lines", "off by one")
            return Scored(Verdict(0.5, False, {"lines": 0.0, "exit": 1.0}, (finding,), "shell@1"))
        case 2:
            return PolicyFault("ran out of disk")
        case _:
            return InfraFault("sandbox", "bwrap died")
