"""Playing episodes in tests: scripted replies in, artifacts or the last step out."""

import functools
import itertools

from envs.sandbox import default_factory
from postrl.contracts import Domain, Task


@functools.cache
def sandboxes():
    return default_factory()


def tasks_of(domain: Domain, kind: str, num: int, split: str = "heldout") -> list[Task]:
    """The first `num` tasks of that kind."""
    found = (task for index in range(2_000) if (task := domain.generate(split, 0, index)).kind == kind)
    return list(itertools.islice(found, num))


def play(env, task: Task, replies=()):
    """Plays `replies`, then empty ones, until the episode ends; returns the last step."""
    env.reset(options={"task": task})
    try:
        for reply in itertools.chain(replies, itertools.repeat("")):
            step = env.step(reply)
            if step[2] or step[3]:
                return step
    finally:
        env.close()


def sh(script: str) -> str:
    return f"```sh\n{script}\n```"
