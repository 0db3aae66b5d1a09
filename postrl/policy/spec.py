"""One `ArraySpec` per parameter array: initial values, shardings, restore targets and abstract inputs derive from it.

A tree of specs has the structure of the parameters it describes, so every derivation is one `jax.tree.map`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""(key, shape) -> float32 array."""


def normal(stddev: float) -> Initializer:
    return lambda key, shape: stddev * jax.random.normal(key, shape, jnp.float32)


def zeros(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key
    return jnp.zeros(shape, jnp.float32)


def ones(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    del key
    return jnp.ones(shape, jnp.float32)


@dataclass(frozen=True)
class ArraySpec:
    """Shape, logical axes (one name or None a dim) and initializer of one array."""

    shape: tuple[int, ...]
    logical_axes: tuple[str | None, ...]
    initializer: Initializer

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(
                f"{len(self.shape)} dims {self.shape} but {len(self.logical_axes)} names {self.logical_axes}"
            )


MESH_AXES = ("data", "fsdp", "tensor")

LOGICAL_TO_MESH: Mapping[str, str] = MappingProxyType(
    {"rows": "data", "model": "fsdp", "heads": "tensor", "kv_heads": "tensor", "ffw": "tensor", "vocab": "tensor"}
)
"""The one table from logical axes to mesh axes; a logical axis that it lacks is replicated (`layers`, `rank`)."""


def partition_spec(logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    """ValueError when two dims of one array would be split over the same mesh axis."""
    mesh_axes = [LOGICAL_TO_MESH.get(name) if name else None for name in logical_axes]
    used = [axis for axis in mesh_axes if axis]
    if len(used) != len(set(used)):
        raise ValueError(
            f"logical axes {logical_axes} map to {mesh_axes}: a mesh axis may split only one dim of an array"
        )
    return PartitionSpec(*mesh_axes)


def _is_spec(node: Any) -> bool:
    return isinstance(node, ArraySpec)


def initialize(specs: Any, key: jax.Array) -> Any:
    """Arrays for a tree of specs; each leaf's key is folded from its position, so that adding a leaf changes no other."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=_is_spec)
    return structure.unflatten(
        [spec.initializer(jax.random.fold_in(key, i), spec.shape) for i, spec in enumerate(leaves)]
    )


def shardings(specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, partition_spec(spec.logical_axes)), specs, is_leaf=_is_spec)


def abstract(specs: Any, mesh: Mesh | None = None) -> Any:
    """`ShapeDtypeStruct`s (float32) for ahead-of-time compilation and for restoring a checkpoint."""

    def leaf(spec: ArraySpec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, partition_spec(spec.logical_axes)) if mesh is not None else None
        return jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding)

    return jax.tree.map(leaf, specs, is_leaf=_is_spec)


def num_parameters(specs: Any) -> int:
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(specs, is_leaf=_is_spec))
