"""Gymnasium environments of real, self-checking tasks, one folder a family.

Importing this package registers them with Gymnasium, so that `gymnasium.make("postrl/Shell-v0")` works after
`import envs`, and `gymnasium.make("envs:postrl/Shell-v0")` without. Made that way, the final reward is the verdict's;
pass `verify=None` for environments whose trajectories are verified later.

A family is a package below `envs` that exports its environment class and `DOMAIN`, a `postrl.contracts.Domain`. To add
one, write the package and its line in `_FAMILIES`; see `envs/shell` for the smallest.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType

import gymnasium

from postrl.contracts import Domain

_FAMILIES = MappingProxyType(
    {
        # domain: (registered id, environment class)
        "shell": ("postrl/Shell-v0", "envs.shell:ShellEnv"),
        "code_repair": ("postrl/CodeRepair-v0", "envs.code_repair:CodeRepairEnv"),
        "filing_fields": ("postrl/FilingFields-v0", "envs.filing_fields:FilingFieldsEnv"),
    }
)

# A string, so that no environment imports a verifier: Gymnasium's user resolves it, the trainer passes None.
_VERIFY = "verifiers.router:verify"

for _id, _entry_point in _FAMILIES.values():
    gymnasium.register(id=_id, entry_point=_entry_point, kwargs={"verify": _VERIFY})


def domains() -> dict[str, Domain]:
    """Every domain by name. Their environments are made without a verifier: the trainer verifies trajectories."""
    return {name: importlib.import_module(f"envs.{name}").DOMAIN for name in _FAMILIES}
