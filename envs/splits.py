"""Train and held-out tasks that can't overlap: what a task shows to the policy decides which split it belongs to.

A quarter of all contents is held out, chosen by their digest. A generator draws candidates until one falls into the
wanted split, so a task can't occur in both, whatever seeds and indices are used and however a domain is extended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import get_args

import numpy as np

from postrl.contracts import Split, Task

_MAX_ATTEMPTS = 200
"""A held-out task is missed 200 times in a row with probability 0.75^200, about 1e-25, unless a space is exhausted."""


def split_of(task: Task, *, by_prompt: bool = False) -> Split:
    """The split that the task's content belongs to, or, with `by_prompt`, its prompt alone."""
    digest = hashlib.sha256(f"{task.domain}\0{task.prompt}".encode()).hexdigest() if by_prompt else task.content_digest
    return "heldout" if int(digest[:2], 16) % 4 == 0 else "train"


def draw(
    domain: str,
    split: Split,
    seed: int,
    index: int,
    make: Callable[[np.random.Generator], Task],
    *,
    by_prompt: bool = False,
) -> Task:
    """The task of `(domain, split, seed, index)`: the first that `make` gives whose content belongs to `split`.

    `make(rng)` builds a task (with its `split`, `seed` and `index` filled in) from nothing but the generator, which is
    seeded by `(domain, split, seed, index, attempt)`. With `by_prompt` no prompt occurs in both splits either, which is
    stronger, and right where the prompt alone nearly fixes the answer; it needs many different prompts.

    Raises ValueError for arguments that name no task, and when none of 200 attempts falls into the split, which means
    that `make` has too few contents.
    """
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected one of {', '.join(get_args(Split))}")
    if seed < 0 or index < 0:
        raise ValueError(f"seed {seed}, index {index}: both must be 0 or more")
    key = int.from_bytes(hashlib.sha256(f"{domain}/{split}".encode()).digest()[:8], "big")
    for attempt in range(_MAX_ATTEMPTS):
        task = make(np.random.default_rng([key, seed, index, attempt]))
        if split_of(task, by_prompt=by_prompt) == split:
            return task
    raise ValueError(
        f"no {split} task of {domain} in {_MAX_ATTEMPTS} attempts (seed {seed}, index {index}): "
        "the generator has too few different contents; give it more names, values or phrasings"
    )
