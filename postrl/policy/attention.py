"""How queries meet keys: over the tokens of a packed row (learner), and over a paged cache (engine).

Both are `attend` values of `postrl.policy.model.forward`; what they compute is in `postrl.policy.ops`. Shapes: T tokens, G kv
heads, K head dim, L layers, P pages of 16 tokens, N sequences.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from postrl.policy import ops
from postrl.policy.model import Attend, ModelConfig


def packed(segment_T: jax.Array, parent_T: jax.Array) -> Attend:
    """Attention among the tokens of a row: each sees earlier tokens of its own segment and of the segment's parent.

    A group is packed as one prompt segment and a segment an episode whose parent is that prompt, so that the prompt's
    activations are computed once. Segment 0 is padding.
    """

    def attend(layer: jax.Array, cache: Any, *operands: jax.Array) -> tuple[jax.Array, Any]:
        del layer
        return ops.packed_attention(*operands, segment_T, parent_T), cache

    return attend


@struct.dataclass
class PagedCache:
    """Keys and values of P pages. Keys lie as [K, 16]: sixteen keys' values of a dim are read at once."""

    keys: Any  # [L, P, G, K, 16]
    values: Any  # [L, P, G, 16, K'], K' being K filled up to a multiple of 16


def empty_cache(config: ModelConfig, num_pages: int) -> PagedCache:
    """A cache of `num_pages` pages and one more, which takes what padding writes."""
    shape = (config.num_layers, num_pages + 1, config.num_kv_heads)
    width = -(-config.head_dim // ops.PAGE_SIZE) * ops.PAGE_SIZE
    return PagedCache(
        keys=jnp.zeros((*shape, config.head_dim, ops.PAGE_SIZE), jnp.float32),
        values=jnp.zeros((*shape, ops.PAGE_SIZE, width), jnp.float32),
    )


def paged(sequence_T: jax.Array, position_T: jax.Array, table_NP: jax.Array) -> Attend:
    """Attention of new tokens, written into the cache first, to all of their sequences (see `ops.paged_attention`)."""

    def attend(layer: jax.Array, cache: PagedCache, *operands: jax.Array) -> tuple[jax.Array, PagedCache]:
        o_TGMK, keys, values = ops.paged_attention(
            *operands, sequence_T, position_T, table_NP, cache.keys, cache.values, layer
        )
        return o_TGMK, PagedCache(keys, values)

    return attend
