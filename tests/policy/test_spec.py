"""What derives from one spec per array: initial values, sizes, shardings, abstract inputs; and the sharded forward."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from postrl.policy.model import adapter_specs, param_specs
from postrl.policy.spec import (
    MESH_AXES,
    ArraySpec,
    abstract,
    initialize,
    normal,
    num_parameters,
    ones,
    partition_spec,
    shardings,
    zeros,
)
from tests.policy.tiny import MODEL, RANK


def test_leaves_are_keyed_by_their_position():
    key = jax.random.key(3)
    specs = {"a": ArraySpec((2, 3), ("model", None), normal(1.0)), "b": ArraySpec((4,), (None,), normal(0.5))}
    arrays = initialize(specs, key)
    np.testing.assert_array_equal(arrays["a"], jax.random.normal(jax.random.fold_in(key, 0), (2, 3)))
    np.testing.assert_array_equal(arrays["b"], 0.5 * jax.random.normal(jax.random.fold_in(key, 1), (4,)))

    more = initialize({**specs, "c": ArraySpec((5,), (None,), normal(1.0))}, key)
    np.testing.assert_array_equal(more["a"], arrays["a"])
    np.testing.assert_array_equal(more["b"], arrays["b"])


def test_ones_and_zeros_are_float32():
    arrays = initialize([ArraySpec((2,), (None,), ones), ArraySpec((3,), (None,), zeros)], jax.random.key(0))
    assert [a.dtype for a in arrays] == [jnp.float32] * 2
    np.testing.assert_array_equal(arrays[0], [1, 1])
    np.testing.assert_array_equal(arrays[1], [0, 0, 0])


def test_a_new_adapter_adds_nothing():
    for pair in vars(adapter_specs(MODEL, RANK)).values():
        arrays = initialize(pair, jax.random.key(0))
        assert np.any(arrays.a)
        assert not np.any(arrays.b)


def test_number_of_parameters_by_hand():
    attention = 32 * (4 * 8) + 2 * 32 * (2 * 8) + (4 * 8) * 32
    assert num_parameters(param_specs(MODEL)) == 64 * 32 + 2 * (2 * 32 + attention + 3 * 32 * 48) + 32
    maps = [(32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48)]
    assert num_parameters(adapter_specs(MODEL, RANK)) == 2 * RANK * sum(rows + cols for rows, cols in maps)


def test_shapes_of_specs_arrays_and_abstract_inputs_agree():
    specs = param_specs(MODEL)
    wanted = [spec.shape for spec in jax.tree.leaves(specs, is_leaf=lambda n: isinstance(n, ArraySpec))]
    arrays = jax.eval_shape(lambda key: initialize(specs, key), jax.random.key(0))
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(arrays)] == [(s, jnp.float32) for s in wanted]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract(specs))] == [(s, jnp.float32) for s in wanted]


def test_logical_axes_become_mesh_axes():
    assert partition_spec(("layers", "heads", "model")) == PartitionSpec(None, "tensor", "fsdp")
    assert partition_spec(("vocab", "model")) == PartitionSpec("tensor", "fsdp")
    assert partition_spec((None,)) == PartitionSpec(None)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), MESH_AXES)
    tree = shardings(param_specs(MODEL), mesh)
    assert tree.layers.w_down.spec == PartitionSpec(None, "fsdp", "tensor")
    assert abstract(param_specs(MODEL), mesh).embed.sharding == tree.embed


def test_two_dims_on_one_mesh_axis_are_refused():
    with pytest.raises(ValueError, match=r"'heads', 'ffw'.*only one dim"):
        partition_spec(("heads", "ffw"))


def test_every_dim_needs_a_name():
    with pytest.raises(ValueError, match="2 dims"):
        ArraySpec((2, 3), ("model",), zeros)


SHARDED_FORWARD = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from postrl.policy.attention import packed
from postrl.policy.model import adapter_specs, forward, logits, param_specs
from postrl.policy.spec import MESH_AXES, shardings
from tests.policy.tiny import ADAPTER_SCALE, MODEL, RANK, tiny_adapter, tiny_params

assert jax.device_count() == 8
token_T = jnp.asarray(np.random.default_rng(0).integers(0, 64, 64), jnp.int32)

def run(params, adapter, token_T):
    segment_T, position_T = 1 + jnp.arange(64) // 16, jnp.arange(64) % 16
    h_TD, _ = forward(MODEL, params, adapter, ADAPTER_SCALE, token_T, position_T, packed(segment_T, -segment_T))
    return logits(params, h_TD)

single = np.asarray(jax.jit(run)(tiny_params(), tiny_adapter(), token_T))
for shape in ((2, 2, 2), (1, 4, 2)):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), MESH_AXES)
    params = jax.device_put(tiny_params(), shardings(param_specs(MODEL), mesh))
    adapter = jax.device_put(tiny_adapter(), shardings(adapter_specs(MODEL, RANK), mesh))
    tokens = jax.device_put(token_T, NamedSharding(mesh, PartitionSpec("data")))
    assert params.layers.wq.addressable_shards[0].data.shape == (2, 32 // shape[2], 32 // shape[1])
    assert len({shard.device for shard in params.embed.addressable_shards}) == 8
    np.testing.assert_allclose(np.asarray(jax.jit(run)(params, adapter, tokens)), single, atol=1e-5, rtol=0)
print("equal")
"""


def test_sharded_forward_equals_a_single_device():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED_FORWARD], env=env, capture_output=True, text=True, timeout=900)
    assert done.stdout == "equal\n", done.stderr[-3000:]
