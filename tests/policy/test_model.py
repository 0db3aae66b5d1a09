"""The forward against a float64 reference that loops over tokens and heads, and the adapter against merged weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from postrl.policy import ops
from postrl.policy.attention import packed
from postrl.policy.model import LINEAR_MAPS, Adapter, ModelConfig, forward, logits
from tests.policy.tiny import ADAPTER_SCALE, MODEL, reference_logits, rotated, row_norm, tiny_adapter, tiny_params

TOKENS = np.random.default_rng(1).integers(0, MODEL.vocab_size, 11)


@functools.partial(jax.jit, static_argnames="differentiable")
def plain_logits(params, adapter, token_T, *, differentiable=False):
    segment_T = jnp.ones(len(token_T), jnp.int32)
    position_T = jnp.arange(len(token_T), dtype=jnp.int32)
    attend = packed(segment_T, -segment_T)
    h_TD, cache = forward(
        MODEL, params, adapter, ADAPTER_SCALE, token_T, position_T, attend, differentiable=differentiable
    )
    assert cache is None
    return logits(params, h_TD)


def test_forward_equals_the_float64_reference():
    wanted = reference_logits(MODEL, tiny_params(), TOKENS)
    np.testing.assert_allclose(plain_logits(tiny_params(), None, TOKENS), wanted, atol=1e-5, rtol=0)


def test_adapted_forward_equals_the_float64_reference():
    base = reference_logits(MODEL, tiny_params(), TOKENS)
    wanted = reference_logits(MODEL, tiny_params(), TOKENS, adapter=tiny_adapter(), scale=ADAPTER_SCALE)
    np.testing.assert_allclose(plain_logits(tiny_params(), tiny_adapter(), TOKENS), wanted, atol=2e-5, rtol=0)
    assert np.abs(wanted - base).max() > 0.1


@pytest.mark.parametrize("adapted", [False, True])
def test_layers_cut_out_of_their_stack_are_the_same_function(adapted):
    params, adapter = tiny_params(), tiny_adapter() if adapted else None
    wanted = plain_logits(params, adapter, TOKENS)
    got = plain_logits(params, adapter, TOKENS, differentiable=True)
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)


def test_tokens_beyond_the_count_are_left_out():
    """Only the first 7 of 11 tokens are real: their activations are those of the seven alone."""
    segment_T = jnp.array([1] * 7 + [0] * 4, jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def activations(num, count):
        attend = packed(segment_T[:num], -segment_T[:num] - 1)
        position_T = jnp.arange(num, dtype=jnp.int32)
        return forward(
            MODEL, tiny_params(), tiny_adapter(), ADAPTER_SCALE, TOKENS[:num], position_T, attend, count=count
        )[0]

    got = activations(11, jnp.int32(7))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[:7], activations(7, jnp.int32(7)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("differentiable", [False, True])
def test_adapter_and_its_gradient_equal_merged_weights(differentiable):
    """Merging `w + scale * b @ a` first is the same function of the adapter; autodiff through it is the oracle."""

    def adapted(adapter):
        return plain_logits(tiny_params(), adapter, TOKENS, differentiable=differentiable)

    def merged(adapter):
        layers = tiny_params().layers
        weights = {
            name: getattr(layers, name) + ADAPTER_SCALE * jnp.einsum("lor,lri->loi", pair.b, pair.a)
            for name, pair in vars(adapter).items()
        }
        assert set(weights) == set(LINEAR_MAPS)
        return plain_logits(tiny_params().replace(layers=layers.replace(**weights)), None, TOKENS)

    def score(function):
        return jax.jit(jax.value_and_grad(lambda adapter: jnp.sum(jnp.sin(function(adapter)))))

    np.testing.assert_allclose(adapted(tiny_adapter()), merged(tiny_adapter()), atol=1e-5, rtol=0)
    (value, gradient), (wanted_value, wanted) = score(adapted)(tiny_adapter()), score(merged)(tiny_adapter())
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    for (path, got), leaf in zip(
        jax.tree_util.tree_flatten_with_path(gradient)[0], jax.tree.leaves(wanted), strict=True
    ):
        assert np.abs(leaf).max() > 1e-2
        np.testing.assert_allclose(got, leaf, atol=2e-5 * np.abs(leaf).max(), rtol=1e-4, err_msg=str(path))


def test_a_new_adapter_changes_no_bit():
    fresh = Adapter(**{name: pair.replace(b=jnp.zeros_like(pair.b)) for name, pair in vars(tiny_adapter()).items()})
    np.testing.assert_array_equal(plain_logits(tiny_params(), fresh, TOKENS), plain_logits(tiny_params(), None, TOKENS))


def test_every_map_and_norm_takes_part():
    """The gradient of the log-probabilities reaches each array of base and adapter."""

    def total(params, adapter):
        return jnp.sum(jax.nn.log_softmax(plain_logits(params, adapter, TOKENS))[:, 7])

    for gradient in jax.grad(total, argnums=(0, 1))(tiny_params(), tiny_adapter()):
        for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
            is_stacked = leaf.shape[0] == MODEL.num_layers
            assert all(np.any(np.asarray(g)) for g in (leaf if is_stacked else leaf[None])), path


def test_rms_norm_by_hand():
    x = jnp.array([[3.0, 4.0]])
    got = ops.rms_norm(x, jnp.array([[1.0, 2.0]]), jnp.int32(0), jnp.int32(1), eps=1e-5)
    root = np.sqrt((9 + 16) / 2 + 1e-5)
    np.testing.assert_allclose(got[0], [3 / root, 8 / root], rtol=1e-6)
    np.testing.assert_allclose(got[0], row_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 1e-5), rtol=1e-6)


def rotate(x_TK, position_T):
    cosine_TK, sine_TK = ops.rope_angles(jnp.array(position_T, jnp.int32), theta=100.0, head_dim=x_TK.shape[-1])
    return ops.rotate(x_TK, cosine_TK, sine_TK)


def test_rotate_by_hand():
    """Pair (0, 2) turns by position, pair (1, 3) by position / sqrt(theta)."""
    got = rotate(jnp.array([[1.0, 0.0, 0.0, 1.0]]), [3])[0]
    np.testing.assert_allclose(got, [np.cos(3), -np.sin(0.3), np.sin(3), np.cos(0.3)], atol=1e-6)
    np.testing.assert_allclose(got, rotated(np.array([1.0, 0, 0, 1]), 3, 100.0), atol=1e-6)


def test_rotated_products_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 8)), jnp.float32) for _ in range(2))

    def product(i, j):
        return jnp.sum(rotate(q, [i]) * rotate(k, [j]))

    np.testing.assert_allclose(product(9, 4), product(25, 20), atol=1e-5)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 5}, "num_heads 5 must be a multiple of num_kv_heads 2"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**dataclasses.asdict(MODEL), **change})
