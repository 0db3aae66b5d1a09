"""One step of the engine on the device: any mix of prompt chunks and running requests, as one flat list of tokens.

The shape never changes (tokens with the sequence that each belongs to, pages of each sequence, the rows to sample from), so a
mix compiles nothing; it is the shape that ragged paged attention kernels take on TPUs.

Shapes: T tokens, N sequences, P pages of a sequence, R rows to sample from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Sized
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from postrl.policy import ops
from postrl.policy.attention import PagedCache, paged
from postrl.policy.model import Adapter, ModelConfig, Params, forward, inverse_temperature, logits


@struct.dataclass
class StepBatch:
    token_T: Any  # int32 [T]
    position_T: Any  # int32 [T]
    sequence_T: Any  # int32 [T]: row of `table_NP`; -1: padding
    num_tokens: Any  # int32 []
    table_NP: Any  # int32 [N, P]
    row_R: Any  # int32 [R]: index into T
    seed_R: Any  # int32 [R]
    inverse_temperature_R: Any  # float32 [R]
    greedy_R: Any  # bool [R]
    num_rows: Any  # int32 []


@dataclass(frozen=True)
class Span:
    """The tokens of one sequence that a step computes."""

    token_T: np.ndarray
    first_position: int
    pages: Sized[int]
    sampled: bool
    """A token is sampled after the last one."""
    seed: int
    temperature: float


def step_batch(spans: Sized[Span], *, num_tokens: int, num_sequences: int, num_pages: int) -> StepBatch:
    """The batch of the given shape; rows to sample from are in the order of `spans`."""
    token_T, position_T = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    sequence_T = np.full(num_tokens, -1, np.int32)
    table_NP = np.zeros((num_sequences, num_pages), np.int32)
    row_R, seed_R = np.zeros(num_sequences, np.int32), np.zeros(num_sequences, np.int32)
    inverse_R, greedy_R = np.ones(num_sequences, np.float32), np.zeros(num_sequences, bool)
    t = r = 0
    for n, span in enumerate(spans):
        end = t + len(span.token_T)
        token_T[t:end], sequence_T[t:end] = span.token_T, n
        position_T[t:end] = np.arange(span.first_position, span.first_position + len(span.token_T))
        table_NP[n, : len(span.pages)] = span.pages
        t = end
        if span.sampled:
            row_R[r], seed_R[r], greedy_R[r] = end - 1, span.seed, span.temperature == 0
            inverse_R[r] = inverse_temperature(span.temperature)
            r += 1
    return StepBatch(
        token_T, position_T, sequence_T, np.int32(t), table_NP, row_R, seed_R, inverse_R, greedy_R, np.int32(r)
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4,))
def engine_step(
    model: ModelConfig,
    adapter_scale: float,
    params: Params,
    adapter: Adapter | None,
    cache: PagedCache,
    batch: StepBatch,
) -> tuple[jax.Array, jax.Array, PagedCache]:
    """Sampled tokens [R], their log-probabilities [R] under the distribution that they were sampled from, and the cache.

    A token's randomness is keyed by its request's seed and its position alone.
    """
    attend = paged(batch.sequence_T, batch.position_T, batch.table_NP)
    h_TD, cache = forward(
        model,
        params,
        adapter,
        adapter_scale,
        batch.token_T,
        batch.position_T,
        attend,
        cache,
        count=batch.num_tokens,
    )
    logits_RV = logits(params, h_TD[batch.row_R], batch.num_rows)
    uniform_R = jax.vmap(lambda seed, t: jax.random.uniform(jax.random.fold_in(jax.random.key(seed), t)))(
        batch.seed_R, batch.position_T[batch.row_R]
    )
    uniform_R = jnp.where(batch.greedy_R, -1.0, uniform_R)
    token_R, logprob_R = ops.sample(logits_RV, batch.inverse_temperature_R, uniform_R, batch.num_rows)
    return token_R, logprob_R, cache
