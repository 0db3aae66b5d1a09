"""The learner: one pure, jitted step from state and batch to state and metrics.

The step loops over the packed rows on the device, adds up gradients of sums, and divides by the batch's number of loss
tokens once. What is trained is an argument: the adapter while the base stays frozen, or the parameters themselves.

Shapes: B = 1 row at a time, T tokens, N loss tokens, D model, V vocab.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from postrl.learner.batch import Row, TrainBatch
from postrl.learner.losses import Loss
from postrl.policy import ops
from postrl.policy.attention import packed
from postrl.policy.model import Adapter, ModelConfig, Params, forward, inverse_temperature, logits


@struct.dataclass
class TrainState:
    step: Any  # int32 []: optimizer steps taken
    trainable: Any  # Adapter, or Params in full training
    opt_state: Any


@dataclass(frozen=True)
class StepConfig:
    """What the compiled step depends on besides shapes."""

    model: ModelConfig
    adapter_scale: float
    """LoRA's alpha / rank."""
    temperature: float
    """Of sampling: the learner scores tokens under the distribution that they were sampled from."""
    loss: Loss
    optimizer: optax.GradientTransformation


def init_state(trainable: Any, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(step=jnp.int32(0), trainable=trainable, opt_state=optimizer.init(trainable))


def policy_parts(trainable: Any, frozen: Params | None) -> tuple[Params, Adapter | None]:
    """The forward's arguments: a frozen base with its adapter, or trained parameters alone (`frozen` is None)."""
    return (trainable, None) if frozen is None else (frozen, trainable)


def score_row(config: StepConfig, params: Params, adapter: Adapter | None, row: Row) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of the row's loss tokens and the entropies where they were drawn, float32 [N] each."""
    h_TD, _ = forward(
        config.model,
        params,
        adapter,
        config.adapter_scale,
        row.token_T,
        row.position_T,
        packed(row.segment_T, row.parent_T),
        differentiable=True,
    )
    with jax.named_scope("head"):
        logits_NV = logits(params, h_TD[row.source_N])
        inverse_N = jnp.full(row.target_N.shape, inverse_temperature(config.temperature))
        logprob_N, logz_N = ops.log_probability(logits_NV, inverse_N, row.target_N)
        scaled_NV = jax.lax.stop_gradient(logits_NV * inverse_N[:, None])
        p_NV = jnp.exp(scaled_NV - logz_N[:, None])
        entropy_N = jax.lax.stop_gradient(logz_N - jnp.sum(p_NV * scaled_NV, axis=-1))
    return logprob_N, entropy_N


@functools.partial(jax.jit, static_argnums=(0,), donate_argnums=(1,))
def train_step(
    config: StepConfig, state: TrainState, frozen: Params | None, batch: TrainBatch
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on a batch.

    Metrics (float32 scalars): `loss`, `entropy`, and the loss's own, as means over loss tokens; `logprob_gap.max`, the
    largest difference between a loss token's log-probability here and when it was sampled, in nats, and
    `logprob_gap.relative.max`, the same over the larger of 1 and the latter's magnitude; `grad_norm`, `update_norm`.
    """

    def row_loss(trainable: Any, row: Row) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprob_N, entropy_N = score_row(config, *policy_parts(trainable, frozen), row)
        loss, sums = config.loss(logprob_N, row)
        gap_N = jnp.where(row.mask_N, jnp.abs(logprob_N - row.sampled_logprob_N), 0.0)
        # What rounding leaves grows with the magnitude of a log-probability.
        relative_gap_N = gap_N / jnp.maximum(1.0, jnp.abs(row.sampled_logprob_N))
        gaps = {
            "logprob_gap.max": jnp.max(gap_N),
            "logprob_gap.relative.max": jnp.max(jnp.where(row.mask_N, relative_gap_N, 0.0)),
        }
        return loss, {**sums, "loss.sum": loss, "entropy.sum": jnp.sum(entropy_N * row.mask_N), **gaps}

    def take_row(i: jax.Array) -> Row:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batch.rows)

    def add_row(i: jax.Array, total: tuple[Any, dict[str, jax.Array]]) -> tuple[Any, dict[str, jax.Array]]:
        gradient, sums = total
        (_, row_sums), row_gradient = jax.value_and_grad(row_loss, has_aux=True)(state.trainable, take_row(i))
        combined = {k: jnp.maximum(sums[k], v) if k.endswith(".max") else sums[k] + v for k, v in row_sums.items()}
        return jax.tree.map(jnp.add, gradient, row_gradient), combined

    zero_sums = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(row_loss, state.trainable, take_row(jnp.int32(0)))[1]
    )
    zero_gradient = jax.tree.map(jnp.zeros_like, state.trainable)
    gradient, sums = jax.lax.fori_loop(0, batch.num_rows, add_row, (zero_gradient, zero_sums))
    # The global denominator: see postrl/learner/losses.py.
    denominator = jnp.maximum(batch.num_loss_tokens, 1).astype(jnp.float32)
    gradient = jax.tree.map(lambda g: g / denominator, gradient)
    updates, opt_state = config.optimizer.update(gradient, state.opt_state, state.trainable)
    metrics = {k.removesuffix(".sum"): v / denominator if k.endswith(".sum") else v for k, v in sums.items()}
    metrics |= {"grad_norm": optax.tree.norm(gradient), "update_norm": optax.tree.norm(updates)}
    return TrainState(state.step + 1, optax.apply_updates(state.trainable, updates), opt_state), metrics
