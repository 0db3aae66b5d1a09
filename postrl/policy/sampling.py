"""One token from logits: sampled, or the heaviest. Both look at the vocabulary in blocks first, and then into one block.

Shapes: B rows, V vocab, N blocks of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 128


def sample_inverse_cdf(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """The token at which the cumulative probability passes `uniform_B` in [0, 1).

    Two levels (blocks of the vocabulary, then the block): one uniform number a token instead of V, and no scan over V.
    """
    weight_BNV = jnp.exp(_in_blocks(logits_BV) - jnp.max(logits_BV, axis=-1)[:, None, None])
    sum_BN = weight_BNV.sum(-1)
    cumulative_BN = jnp.cumsum(sum_BN, axis=-1)
    target_B = uniform_B * cumulative_BN[:, -1]
    n_B = _first_above(cumulative_BN, sum_BN, target_B)
    weight_Bv = jnp.take_along_axis(weight_BNV, n_B[:, None, None], axis=1)[:, 0]
    before_B = jnp.take_along_axis(cumulative_BN - sum_BN, n_B[:, None], axis=1)[:, 0]
    v_B = _first_above(jnp.cumsum(weight_Bv, axis=-1), weight_Bv, target_B - before_B)
    return n_B * BLOCK + v_B


def heaviest(logits_BV: jax.Array) -> jax.Array:
    """The token of the largest logit, the first among equals: `argmax`, which takes XLA:CPU a scalar loop over V, by blocks."""
    logits_BNV = _in_blocks(logits_BV)
    n_B = jnp.argmax(logits_BNV.max(-1), axis=-1)
    return n_B * BLOCK + jnp.argmax(jnp.take_along_axis(logits_BNV, n_B[:, None, None], axis=1)[:, 0], axis=-1)


def _in_blocks(logits_BV: jax.Array) -> jax.Array:
    """[B, N, BLOCK], filled up with tokens that have no weight."""
    B, V = logits_BV.shape
    padded = jnp.pad(logits_BV, ((0, 0), (0, -V % BLOCK)), constant_values=-jnp.inf)
    return padded.reshape(B, -1, BLOCK)


def _first_above(cumulative_BN: jax.Array, weight_BN: jax.Array, target_B: jax.Array) -> jax.Array:
    """First index whose cumulative weight exceeds the target. Where rounding leaves none, the heaviest: never weight 0."""
    above_BN = (cumulative_BN > target_B[:, None]) & (weight_BN > 0)
    return jnp.where(above_BN.any(-1), jnp.argmax(above_BN, axis=-1), jnp.argmax(weight_BN, axis=-1))
