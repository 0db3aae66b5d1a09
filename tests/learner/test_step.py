"""The optimizer step: one gradient however rows are split, honest metrics, donated buffers, one compilation a shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from postrl.learner.batch import RowShape, empty_batch, pack
from postrl.learner.losses import PolicyGradient
from postrl.learner.step import StepConfig, TrainState, init_state, policy_parts, train_step
from postrl.rollout.engine import tree_digest
from tests.learner.grouped import random_group
from tests.policy.tiny import ADAPTER_SCALE, MODEL, log_softmax, reference_logits, tiny_adapter, tiny_params

TEMPERATURE = 0.9
CONFIG = StepConfig(MODEL, ADAPTER_SCALE, TEMPERATURE, PolicyGradient(), optax.sgd(1.0))
WIDE, NARROW = RowShape(64, 48), RowShape(16, 8)
MAX_ROWS = 9


@functools.cache
def some_groups():
    rng = np.random.default_rng(7)
    return [random_group(rng, num_members=n, prompt_length=length) for n, length in ((4, 5), (3, 6))]


def fresh_state() -> TrainState:
    return init_state(jax.tree.map(jnp.copy, tiny_adapter()), CONFIG.optimizer)


def stepped(batch, state=None):
    """The state and metrics after one step, as numpy."""
    state, metrics = train_step(CONFIG, state or fresh_state(), tiny_params(), batch)
    return jax.tree.map(np.asarray, state), {name: float(value) for name, value in metrics.items()}


@pytest.fixture(scope="module")
def wide():
    return pack(some_groups(), [WIDE], MAX_ROWS)


@pytest.fixture(scope="module")
def after_wide(wide):
    return stepped(wide)


def test_the_update_does_not_depend_on_packing(wide, after_wide):
    """The same episodes in 2 wide rows, in many narrow ones and in two other orders: one denominator, one gradient."""
    narrow = pack(some_groups(), [NARROW], MAX_ROWS)
    assert narrow.num_rows > wide.num_rows
    assert narrow.num_loss_tokens == wide.num_loss_tokens
    reordered = pack([group[::-1] for group in some_groups()[::-1]], [WIDE], MAX_ROWS)
    alone = pack([[e] for group in some_groups() for e in group], [WIDE], MAX_ROWS)
    wanted_state, wanted_metrics = after_wide
    for batch in (narrow, reordered, alone):
        state, metrics = stepped(batch)
        for got, wanted in zip(jax.tree.leaves(state.trainable), jax.tree.leaves(wanted_state.trainable), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-6, rtol=1e-5)
        for name, value in metrics.items():
            np.testing.assert_allclose(value, wanted_metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_metrics_equal_a_float64_recomputation(wide, after_wide):
    ratios, advantages, logprobs, sampled, entropies = [], [], [], [], []
    for e in (e for group in some_groups() for e in group):
        logits_TV = reference_logits(MODEL, tiny_params(), e.token_T, adapter=tiny_adapter(), scale=ADAPTER_SCALE)
        logprob_TV = log_softmax(logits_TV / TEMPERATURE)
        for t in np.flatnonzero(e.sampled_T):
            logprobs.append(logprob_TV[t - 1, e.token_T[t]])
            sampled.append(float(e.logprob_T[t]))
            advantages.append(e.advantage)
            entropies.append(-np.sum(np.exp(logprob_TV[t - 1]) * logprob_TV[t - 1]))
    log_ratio, advantage = np.array(logprobs) - np.array(sampled), np.array(advantages)
    ratios = np.exp(log_ratio)
    clipped = np.clip(ratios, 0.8, 1.28)
    num = len(ratios)
    assert num == wide.num_loss_tokens
    _, metrics = after_wide
    wanted = {
        "loss": -np.minimum(ratios * advantage, clipped * advantage).sum() / num,
        "kl_sampled": np.sum(ratios - 1 - log_ratio) / num,
        "clipped": np.mean(ratios * advantage > clipped * advantage),
        "entropy": np.mean(entropies),
        "logprob_gap.max": np.abs(log_ratio).max(),
        "logprob_gap.relative.max": np.max(np.abs(log_ratio) / np.maximum(1, np.abs(sampled))),
    }
    assert set(metrics) == {*wanted, "grad_norm", "update_norm"}
    assert 0 < wanted["clipped"] < 1
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_plain_descent_moves_by_the_gradient(after_wide):
    """With SGD of rate 1 the state moves by minus the gradient, whose norm is reported."""
    state, metrics = after_wide
    moved = jax.tree.map(lambda new, old: new - np.asarray(old), state.trainable, tiny_adapter())
    norm = np.sqrt(sum(np.sum(np.square(m, dtype=np.float64)) for m in jax.tree.leaves(moved)))
    np.testing.assert_allclose([metrics["grad_norm"], metrics["update_norm"]], [norm, norm], rtol=1e-4)
    assert state.step == 1


def test_the_gradient_agrees_with_finite_differences(wide, after_wide):
    """Along one random direction of the adapter, the reported loss falls as the gradient says."""
    state, _ = after_wide
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), tiny_adapter())
    gradient = jax.tree.map(lambda old, new: np.asarray(old) - new, tiny_adapter(), state.trainable)
    slope = sum(
        np.sum(g * d, dtype=np.float64) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True)
    )

    def loss_at(step):
        moved = jax.tree.map(lambda x, d: x + step * d, tiny_adapter(), direction)
        return stepped(wide, init_state(moved, CONFIG.optimizer))[1]["loss"]

    epsilon = 1e-3
    np.testing.assert_allclose((loss_at(epsilon) - loss_at(-epsilon)) / (2 * epsilon), slope, rtol=0.03, atol=2e-3)


def test_padded_rows_are_ignored(wide, after_wide):
    """Rows beyond `num_rows` may hold anything, NaN included: same bits."""
    junk = np.arange(MAX_ROWS) >= wide.num_rows
    rows = wide.rows.replace(
        mask_N=wide.rows.mask_N | junk[:, None],
        advantage_N=np.where(junk[:, None], np.float32(np.nan), wide.rows.advantage_N),
        token_T=np.where(junk[:, None], 63, wide.rows.token_T).astype(np.int32),
    )
    state, metrics = stepped(wide.replace(rows=rows))
    assert tree_digest(state) == tree_digest(after_wide[0])
    assert metrics == after_wide[1]


def test_padded_tokens_are_ignored(wide, after_wide):
    """Tokens of segment 0 and masked loss slots may hold any number."""
    is_padding = wide.rows.segment_T == 0
    rows = wide.rows.replace(
        token_T=np.where(is_padding, 63, wide.rows.token_T).astype(np.int32),
        advantage_N=np.where(wide.rows.mask_N, wide.rows.advantage_N, 5).astype(np.float32),
        target_N=np.where(wide.rows.mask_N, wide.rows.target_N, 9).astype(np.int32),
    )
    state, metrics = stepped(wide.replace(rows=rows))
    for got, wanted in zip(jax.tree.leaves(state.trainable), jax.tree.leaves(after_wide[0].trainable), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-7, rtol=0)
    np.testing.assert_allclose(metrics["loss"], after_wide[1]["loss"], rtol=1e-6)


def test_an_empty_batch_moves_nothing():
    state, metrics = stepped(empty_batch(WIDE, MAX_ROWS))
    assert tree_digest(state.trainable) == tree_digest(tiny_adapter())
    assert set(metrics.values()) == {0.0}


def test_the_state_is_donated_and_the_base_keeps_its_bytes(wide):
    state, base = fresh_state(), tiny_params()
    digest = tree_digest(base)
    new, _ = train_step(CONFIG, state, base, wide)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.trainable))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(base))
    assert tree_digest(base) == digest
    assert tree_digest(new.trainable) != tree_digest(tiny_adapter())


def test_one_compilation_a_shape(wide):
    """Other episodes, other numbers of rows, a state that a step returned: the same program."""
    narrow = pack(some_groups(), [NARROW], MAX_ROWS)
    state, _ = train_step(CONFIG, fresh_state(), tiny_params(), wide)
    stepped(narrow)
    compiled = train_step._cache_size()
    state, _ = train_step(CONFIG, state, tiny_params(), pack(some_groups()[:1], [WIDE], MAX_ROWS))
    state, _ = train_step(CONFIG, state, tiny_params(), pack(some_groups()[1:], [NARROW], MAX_ROWS))
    train_step(CONFIG, state, tiny_params(), empty_batch(WIDE, MAX_ROWS))
    assert train_step._cache_size() == compiled


def test_full_training_moves_the_parameters(wide):
    """Without a frozen base the parameters themselves are trained, each of them."""
    state = init_state(jax.tree.map(jnp.copy, tiny_params()), CONFIG.optimizer)
    new, metrics = train_step(CONFIG, state, None, wide)
    assert int(new.step) == 1
    for (path, old), leaf in zip(
        jax.tree_util.tree_flatten_with_path(tiny_params())[0], jax.tree.leaves(new.trainable), strict=True
    ):
        assert np.any(np.asarray(old != leaf)), path
    assert np.isfinite(float(metrics["loss"]))


def test_what_is_trained_is_an_argument():
    assert policy_parts("adapter", "base") == ("base", "adapter")  # pyright: ignore[reportArgumentType]
    assert policy_parts("params", None) == ("params", None)
