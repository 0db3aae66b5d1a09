"""A packed group row scores, and differentiates, exactly as separate sequences do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from postrl.learner.batch import Row, RowShape, pack
from postrl.learner.losses import Supervised
from postrl.learner.step import StepConfig, score_row
from tests.learner.grouped import make_episode
from tests.policy.tiny import ADAPTER_SCALE, MODEL, log_softmax, reference_logits, tiny_adapter, tiny_params

TEMPERATURE = 0.8
CONFIG = StepConfig(MODEL, ADAPTER_SCALE, TEMPERATURE, Supervised(), optax.sgd(1.0))

GROUP = [
    make_episode([([5, 6, 7, 8], [11, 12])], first_id=0),
    make_episode([([5, 6, 7, 8], [13]), ([20, 21], [14, 15, 16]), ([22], [17])], first_id=100),
    make_episode([([5, 6, 7, 9], [18, 19]), ([23, 24, 25], [1])], first_id=200),
]


def row_of(batch, r: int) -> Row:
    return jax.tree.map(lambda x: jnp.asarray(x[r]), batch.rows)


@functools.partial(jax.jit, static_argnums=(0,))
def scores_and_gradient(config, adapter, row, weight_N):
    """Log-probabilities, entropies, and the gradient of the weighted sum of log-probabilities."""

    def total(adapter):
        logprob_N, entropy_N = score_row(config, tiny_params(), adapter, row)
        return jnp.sum(jnp.where(row.mask_N, logprob_N * weight_N, 0.0)), (logprob_N, entropy_N)

    (_, scores), gradient = jax.value_and_grad(total, has_aux=True)(adapter)
    return scores, gradient


def by_id(row, values):
    """Value of each loss token, by the unique number in its sampled log-probability."""
    mask = np.asarray(row.mask_N)
    return dict(zip(np.asarray(row.sampled_logprob_N)[mask].tolist(), np.asarray(values)[mask], strict=True))


def weights(row):
    return jnp.cos(row.sampled_logprob_N)  # any weights will do, as long as each token has its own


@pytest.fixture(scope="module")
def separate():
    """Every episode in a row of its own: log-probabilities and entropies by token, and the summed gradient."""
    batch = pack([[e] for e in GROUP], [RowShape(12, 6)], max_rows=3)
    assert batch.num_rows == 3
    logprobs, entropies, gradients = {}, {}, []
    for r in range(3):
        row = row_of(batch, r)
        (logprob_N, entropy_N), gradient = scores_and_gradient(CONFIG, tiny_adapter(), row, weights(row))
        logprobs |= by_id(row, logprob_N)
        entropies |= by_id(row, entropy_N)
        gradients.append(gradient)
    return logprobs, entropies, jax.tree.map(lambda *g: sum(g), *gradients)


def test_separate_sequences_equal_the_float64_reference(separate):
    logprobs, entropies, _ = separate
    for e in GROUP:
        logits_TV = reference_logits(MODEL, tiny_params(), e.token_T, adapter=tiny_adapter(), scale=ADAPTER_SCALE)
        logprob_TV = log_softmax(logits_TV / TEMPERATURE)
        for t in np.flatnonzero(e.sampled_T):
            name = float(e.logprob_T[t])
            np.testing.assert_allclose(logprobs[name], logprob_TV[t - 1, e.token_T[t]], atol=1e-5, rtol=0)
            entropy = -np.sum(np.exp(logprob_TV[t - 1]) * logprob_TV[t - 1])
            np.testing.assert_allclose(entropies[name], entropy, atol=1e-5, rtol=0)


def test_one_row_equals_separate_sequences(separate):
    logprobs, entropies, gradient = separate
    batch = pack([GROUP], [RowShape(32, 16)], max_rows=1)
    assert batch.num_rows == 1
    row = row_of(batch, 0)
    (logprob_N, entropy_N), packed_gradient = scores_and_gradient(CONFIG, tiny_adapter(), row, weights(row))
    for got, wanted in ((by_id(row, logprob_N), logprobs), (by_id(row, entropy_N), entropies)):
        assert got.keys() == wanted.keys()
        for name in got:
            np.testing.assert_allclose(got[name], wanted[name], atol=1e-5, rtol=0)
    for got, wanted in zip(jax.tree.leaves(packed_gradient), jax.tree.leaves(gradient), strict=True):
        assert np.abs(wanted).max() > 1e-2
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=1e-5)


def test_neighbours_in_a_row_do_not_touch_each_other(separate):
    """Another group in the same row changes nothing."""
    logprobs, _, _ = separate
    other = [make_episode([([30, 31], [32, 33])], first_id=300)]
    batch = pack([GROUP, other], [RowShape(32, 20)], max_rows=1)
    row = row_of(batch, 0)
    (logprob_N, _), _ = scores_and_gradient(CONFIG, tiny_adapter(), row, weights(row))
    got = by_id(row, logprob_N)
    assert len(got) == len(logprobs) + 2
    for name in logprobs:
        np.testing.assert_allclose(got[name], logprobs[name], atol=1e-5, rtol=0)
