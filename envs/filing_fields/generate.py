"""Filing tasks: a short table or note, and one or two of its fields to hand in as JSON numbers in full units."""

from __future__ import annotations

import json
from decimal import Decimal

import numpy as np

from envs.filing_fields.kinds import KINDS, Problem
from envs.splits import draw
from postrl.contracts import Resources, Split, Task

SYSTEM = 'Hand in full units: (5) is -5, 5K is 5e3, 5M is 5e6.\n```json\n{"cash": 5}\n```\nTo look: ```sh'
RESOURCES = Resources(timeout_s=5.0, cpu_s=2, memory_mb=256, disk_mb=2, file_mb=1, num_processes=32, output_bytes=8_192)

_NAMES = tuple(KINDS)


def generate(split: Split, seed: int, index: int) -> Task:
    """The filing task of that name; see `postrl.contracts.Domain.generate`. Kinds take turns by index."""
    kind = _NAMES[index % len(_NAMES)]

    def make(rng: np.random.Generator) -> Task:
        return make_task(kind, KINDS[kind](rng), split, seed, index)

    return draw("filing_fields", split, seed, index, make, by_prompt=True)


def make_task(kind: str, problem: Problem, split: Split, seed: int, index: int) -> Task:
    """The task that asks for the fields of `problem`. `split`, `seed` and `index` only name it.

    Numbers in `expected` are decimal text, so that they are exact and JSON-like.
    """
    answer = ", ".join(f"{json.dumps(field.key)}: {field.amount.number}" for field in problem.fields)
    template = ", ".join(f"{json.dumps(field.key)}: ?" for field in problem.fields)
    return Task(
        domain="filing_fields",
        kind=kind,
        split=split,
        seed=seed,
        index=index,
        system=SYSTEM,
        prompt=f"{problem.filing}\n{problem.subject}: {{{template}}}",
        files={"filing.txt": f"{problem.filing}\n".encode()},
        expected={
            "fields": {
                field.key: {
                    "value": _decimal(field.amount.value),
                    "other_years": {year: _decimal(value) for year, value in field.other_years.items()},
                }
                for field in problem.fields
            },
            "others": {key: _decimal(value) for key, value in problem.others.items()},
        },
        reference=(f"```json\n{{{answer}}}\n```",),
        max_turns=2,
        resources=RESOURCES,
    )


def _decimal(value: Decimal) -> str:
    """Plain decimal notation without needless zeros: `7100000`, `-0.0045`."""
    return f"{value.normalize():f}"
