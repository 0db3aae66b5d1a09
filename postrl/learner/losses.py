"""Losses as sums over the loss tokens of one row; the denominator is the whole batch's and is applied by the step.

Why a global denominator: a mean within a row or a device weighs a token by how many others happened to share its row, so
the gradient would depend on packing.

Shapes: N loss tokens of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from postrl.learner.batch import Row


@dataclass(frozen=True)
class PolicyGradient:
    """Clipped surrogate of PPO (arXiv 1707.06347, eq. 7) per token, as GRPO (arXiv 2402.03300, eq. 3) and DAPO
    (arXiv 2503.14476, eq. 10, clip_high > clip_low) use it. The KL penalty to the base is left out: it is 0 by default in
    both of the latter's recipes, and the adapter's distance is reported instead.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __call__(self, logprob_N: jax.Array, row: Row) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert logprob_N.ndim == 1 and logprob_N.dtype == jnp.float32
        log_ratio_N = jnp.where(row.mask_N, logprob_N - row.sampled_logprob_N, 0.0)
        ratio_N = jnp.exp(log_ratio_N)
        clipped_N = jnp.clip(ratio_N, 1 - self.clip_low, 1 + self.clip_high)
        surrogate_N = jnp.minimum(ratio_N * row.advantage_N, clipped_N * row.advantage_N)
        is_clipped_N = (ratio_N * row.advantage_N > clipped_N * row.advantage_N) & row.mask_N
        return -jnp.sum(surrogate_N * row.mask_N), {
            # k3 estimator of KL(sampled || current), Schulman, "Approximating KL divergence" (2020).
            "kl_sampled.sum": jnp.sum((ratio_N - 1 - log_ratio_N) * row.mask_N),
            "clipped.sum": jnp.sum(is_clipped_N).astype(jnp.float32),
        }


@dataclass(frozen=True)
class Supervised:
    """Negative log-likelihood of demonstrations."""

    def __call__(self, logprob_N: jax.Array, row: Row) -> tuple[jax.Array, dict[str, jax.Array]]:
        assert logprob_N.ndim == 1 and logprob_N.dtype == jnp.float32
        return -jnp.sum(jnp.where(row.mask_N, logprob_N, 0.0)), {}


Loss = Callable[[jax.Array, Row], tuple[jax.Array, dict[str, jax.Array]]]
"""(logprob_N, row) -> (sum over the row's loss tokens, sums to be reported as means over all loss tokens)."""
