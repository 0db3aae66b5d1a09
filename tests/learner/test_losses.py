"""The losses on four tokens by hand, and their gradients against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from postrl.learner.batch import Row
from postrl.learner.losses import PolicyGradient, Supervised

LOSS = PolicyGradient(clip_low=0.2, clip_high=0.3)


def loss_row(sampled, advantage, mask) -> Row:
    N = len(mask)
    nothing = jnp.zeros(4, jnp.int32)
    return Row(
        token_T=nothing,
        position_T=nothing,
        segment_T=nothing,
        parent_T=nothing,
        source_N=jnp.zeros(N, jnp.int32),
        target_N=jnp.zeros(N, jnp.int32),
        mask_N=jnp.array(mask, bool),
        sampled_logprob_N=jnp.array(sampled, jnp.float32),
        advantage_N=jnp.array(advantage, jnp.float32),
    )


def test_clipped_surrogate_by_hand():
    """Ratios 1.5 up, 1.5 down, 0.5 up, 0.5 down: min(r A, clip(r, 0.8, 1.3) A)."""
    ratio = np.array([1.5, 1.5, 0.5, 0.5])
    advantage = np.array([2.0, -2.0, 3.0, -3.0])
    row = loss_row(np.full(4, -1.0), advantage, [1, 1, 1, 1])
    loss, sums = LOSS(jnp.asarray(-1 + np.log(ratio), jnp.float32), row)
    surrogate = [1.3 * 2, 1.5 * -2, 0.5 * 3, 0.8 * -3]
    np.testing.assert_allclose(loss, -sum(surrogate), rtol=1e-6)
    assert sums["clipped.sum"] == 2  # the first and the last
    np.testing.assert_allclose(sums["kl_sampled.sum"], np.sum(ratio - 1 - np.log(ratio)), rtol=1e-5)


def test_gradient_is_zero_exactly_where_clipped():
    ratio = np.array([1.5, 1.5, 0.5, 0.5])
    advantage = np.array([2.0, -2.0, 3.0, -3.0])
    row = loss_row(np.full(4, -1.0), advantage, [1, 1, 1, 1])
    gradient = jax.grad(lambda lp: LOSS(lp, row)[0])(jnp.asarray(-1 + np.log(ratio), jnp.float32))
    np.testing.assert_allclose(gradient, [0, 1.5 * 2, -0.5 * 3, 0], rtol=1e-6)


def test_on_policy_gradient_is_the_policy_gradient():
    """At ratio 1 the loss is minus the sum of advantages, and its gradient minus advantage times grad log p: through a
    softmax, against central differences of -sum(A log p)."""
    rng = np.random.default_rng(0)
    logits_NV, target = rng.normal(size=(4, 5)), np.array([1, 0, 4, 4])
    advantage = np.array([1.0, -0.5, 2.0, 0.0])

    def logprob(logits):
        return jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], 1)[:, 0]

    row = loss_row(logprob(jnp.asarray(logits_NV, jnp.float32)), advantage, [1, 1, 1, 1])
    value, gradient = jax.value_and_grad(lambda x: LOSS(logprob(x), row)[0])(jnp.asarray(logits_NV, jnp.float32))
    np.testing.assert_allclose(value, -advantage.sum(), rtol=1e-6)

    def plain(x):
        shifted = x - np.log(np.exp(x).sum(-1, keepdims=True))
        return -np.sum(advantage * shifted[np.arange(4), target])

    for n in range(4):
        for v in range(5):
            step = np.zeros((4, 5))
            step[n, v] = 1e-5
            slope = (plain(logits_NV + step) - plain(logits_NV - step)) / 2e-5
            np.testing.assert_allclose(gradient[n, v], slope, atol=1e-5)


@pytest.mark.parametrize("loss", [LOSS, Supervised()])
def test_masked_tokens_count_nothing(loss):
    logprob = jnp.array([-1.0, -2.0, 50.0, -0.5], jnp.float32)
    masked = loss_row([-1.1, -1.9, -80.0, 0.0], [1, -1, 9, 9], [1, 1, 0, 0])
    alone = loss_row([-1.1, -1.9], [1, -1], [1, 1])
    value, sums = loss(logprob, masked)
    wanted, wanted_sums = loss(logprob[:2], alone)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for name in sums:
        np.testing.assert_allclose(sums[name], wanted_sums[name], rtol=1e-6)
    gradient = jax.grad(lambda lp: loss(lp, masked)[0])(logprob)
    assert np.isfinite(gradient).all()
    assert not gradient[2:].any()


def test_supervised_by_hand():
    row = loss_row(np.full(3, np.nan), np.zeros(3), [1, 0, 1])
    logprob = jnp.array([-0.5, -7.0, -1.5], jnp.float32)
    value, sums = Supervised()(logprob, row)
    assert (float(value), sums) == (2.0, {})
    np.testing.assert_array_equal(jax.grad(lambda lp: Supervised()(lp, row)[0])(logprob), [-1, 0, -1])


def test_losses_are_equal_values():
    """They are static arguments of the compiled step: equal ones must not compile twice."""
    assert PolicyGradient(0.1, 0.2) == PolicyGradient(0.1, 0.2)
    assert hash(PolicyGradient(0.1, 0.2)) == hash(PolicyGradient(0.1, 0.2))
    assert PolicyGradient(0.1, 0.2) != PolicyGradient(0.1, 0.3)
    assert hash(Supervised()) == hash(Supervised())
