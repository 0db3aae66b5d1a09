"""One episode: a blocking function from a task to a trajectory. The same one trains, evaluates and demonstrates.

Tokens in, tokens out: each turn appends what the environment said and what the policy sampled to one growing sequence;
nothing that was sampled is decoded and tokenised again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from postrl.contracts import Completion, Message, Sampler, StopReason, Task, Trajectory, Turn
from postrl.policy.chat import ChatFormat


def run_episode(
    task: Task,
    env: Any,
    sampler: Sampler,
    chat: ChatFormat,
    *,
    seed: int,
    max_context: int,
    max_turns: int,
) -> Trajectory:
    """Plays `task` in `env` (a `gymnasium.Env` over text) until it is terminated or truncated.

    Turn k samples with seed `(seed + k) mod 2^31`. An episode is truncated after `max_turns` turns (its task may allow
    fewer) and where its context would outgrow `max_context`. A reply that its token limit cut short is not acted on: half a
    command may do anything but what was meant. The environment counts it as a turn without a tool call, and the policy
    reads why.
    """
    try:
        observation, _ = env.reset(options={"task": task})
        messages = (Message("system", task.system), Message("user", observation))
        context_T = prompt_T = chat.opening(messages)
        turns: list[Turn] = []
        terminated = truncated = False
        while True:
            completion = sampler.sample(context_T, seed=(seed + len(turns)) % 2**31)
            reply = chat.decode(completion.token_T)
            cut = completion.stop is StopReason.LENGTH
            observation, _, terminated, truncated, info = env.step("" if cut else reply)
            if cut:
                observation = f"Cut after {len(completion.token_T)} tokens and not run: be shorter."
            turns.append(Turn(prompt_T, completion, reply, info["call"], observation))
            if terminated or truncated:
                break
            prompt_T = chat.continuation(not cut, observation)
            context_T = np.concatenate([context_T, completion.token_T, prompt_T])
            if len(turns) >= max_turns or len(context_T) >= max_context:
                truncated = True
                info = env.unwrapped.finish()
                break
        return Trajectory(
            task=task,
            episode_seed=seed,
            turns=tuple(turns),
            terminated=terminated,
            truncated=truncated,
            artifacts=info["artifacts"],
            commands=env.unwrapped.commands,
            sandbox_s=env.unwrapped.sandbox_s,
        )
    finally:
        env.close()


@dataclass
class ReferenceSampler:
    """Replays a task's reference replies: how demonstrations are made, through the same episode as everything else."""

    chat: ChatFormat
    reference: tuple[str, ...]
    _next: int = field(default=0, init=False)

    def sample(self, token_T: np.ndarray, *, seed: int) -> Completion:
        del token_T, seed
        reply_T = self.chat.encode_reply(self.reference[self._next])
        self._next += 1
        # Nothing was sampled: version -1, and a log-probability that no ratio may be formed with.
        return Completion(
            reply_T, np.full(len(reply_T), np.nan, np.float32), np.full(len(reply_T), -1, np.int32), StopReason.STOP
        )
