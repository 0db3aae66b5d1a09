"""The inverse CDF: exact on distributions by hand, never a token of probability 0, and the right frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from postrl.policy.sampling import heaviest, sample_inverse_cdf

sample = jax.jit(sample_inverse_cdf)


def sampled(p_V, uniforms) -> np.ndarray:
    with np.errstate(divide="ignore"):
        logits_V = np.log(np.asarray(p_V, np.float64)).astype(np.float32)
    return np.asarray(sample(jnp.tile(logits_V, (len(uniforms), 1)), jnp.asarray(uniforms, jnp.float32)))


def test_by_hand():
    """Cumulative 0.25, 0.25, 0.75, 1: token 1 has probability 0."""
    uniforms = [0.0, 0.1, 0.2499, 0.2501, 0.5, 0.7499, 0.7501, 0.99, np.float32(1 - 2**-24)]
    assert sampled([0.25, 0.0, 0.5, 0.25], uniforms).tolist() == [0, 0, 0, 2, 2, 2, 3, 3, 3]


def test_a_bound_belongs_to_the_next_token():
    """Equal weights are exact in float32: the token whose cumulative probability exceeds the number, not equals it."""
    assert sampled([0.25] * 4, [0.0, 0.25, 0.5, 0.75]).tolist() == [0, 1, 2, 3]
    assert sampled([0.25] * 4, np.nextafter(np.float32([0.25, 0.5, 0.75, 1]), np.float32(0))).tolist() == [0, 1, 2, 3]
    assert sampled([0.0, 0.5, 0.0, 0.5, 0.0], [0.0, 0.5, np.float32(1 - 2**-24)]).tolist() == [1, 3, 3]


def test_shifted_logits_are_the_same_distribution():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.25]))
    uniform = jnp.array([0.3, 0.6, 0.8])
    for shift in (0.0, 64.0, -64.0):
        assert sample(jnp.tile(logits + shift, (3, 1)), uniform).tolist() == [0, 1, 2]


def test_across_blocks_of_the_vocabulary():
    """300 tokens are three blocks, the last one partly empty: the middle of each token's interval gives that token."""
    p_V = np.random.default_rng(0).dirichlet(np.ones(300))
    middle = np.cumsum(p_V) - p_V / 2
    wide = p_V > 1e-5  # narrower intervals are lost in float32 sums
    assert wide.sum() > 280
    np.testing.assert_array_equal(sampled(p_V, middle)[wide], np.flatnonzero(wide))


@pytest.mark.parametrize("num_tokens", [1, 5, 127, 128, 129, 300])
def test_probability_zero_is_never_sampled(num_tokens):
    """Whole blocks of zeros, the first and the last token included, at the ends of the unit interval too."""
    rng = np.random.default_rng(num_tokens)
    p_V = rng.dirichlet(np.ones(num_tokens))
    p_V[rng.random(num_tokens) < 0.5] = 0
    p_V[: num_tokens // 3] = 0
    p_V[-1 if num_tokens > 1 else 1 :] = 0
    p_V[num_tokens // 2] = 0.1
    uniforms = np.concatenate([rng.random(2_000), [0.0, 2**-24, 1 - 2**-24, 1 - 2**-23]])
    drawn = sampled(p_V / p_V.sum(), uniforms)
    assert (p_V[drawn] > 0).all()


@pytest.mark.parametrize("num_tokens", [1, 5, 127, 128, 129, 300, 512])
def test_the_heaviest_is_the_first_of_the_largest(num_tokens):
    """Few different values, so that the largest occurs often, within a block and across blocks; and a row of the lowest."""
    logits_BV = np.random.default_rng(num_tokens).integers(-3, 3, (200, num_tokens)).astype(np.float32)
    logits_BV[0] = np.finfo(np.float32).min
    np.testing.assert_array_equal(jax.jit(heaviest)(logits_BV), np.argmax(logits_BV, axis=-1))


def test_frequencies():
    """Even spacing gives each token its share to within one; random numbers pass a chi-squared test (fixed seed)."""
    p_V = np.array([0.4, 0.05, 0.0, 0.3, 0.15, 0.1])
    num = 20_000
    even = np.bincount(sampled(p_V, (np.arange(num) + 0.5) / num), minlength=6)
    np.testing.assert_allclose(even, num * p_V, atol=1.01)
    drawn = np.bincount(sampled(p_V, jax.random.uniform(jax.random.key(0), (num,))), minlength=6)
    assert drawn[2] == 0
    seen = p_V > 0
    assert stats.chisquare(drawn[seen], num * p_V[seen]).pvalue > 1e-3
