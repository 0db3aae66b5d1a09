"""How queries meet keys: over the tokens of packed rows (learner), and over a cache of slots (engine).

Both are `attend` values of `postrl.policy.model.forward`. Shapes: B rows, T tokens, S kv tokens, G kv heads, M query heads
a kv head, K head dim, L layers, Z slots of the cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from postrl.policy.model import Attend, ModelConfig

MASKED = -1e30
"""Finite, so that a row with no visible key (padding) gives numbers, not NaN."""


def segment_mask(segment_BT: jax.Array, parent_BT: jax.Array) -> jax.Array:
    """visible_BTS for packed rows: a token sees earlier tokens of its own segment and of the segment's parent.

    A group is packed as one prompt segment and a segment an episode whose parent is that prompt, so that the prompt's
    activations are computed once. Segment 0 is padding and sees, and is seen by, padding only.
    """
    T = segment_BT.shape[1]
    causal_TS = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    own_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    prompt_BTS = parent_BT[:, :, None] == segment_BT[:, None, :]
    return causal_TS & (own_BTS | prompt_BTS)


def packed(visible_BTS: jax.Array) -> Attend:
    """Attention among the tokens of each row."""

    def attend(index: jax.Array, cache: Any, q_BTGMK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array) -> tuple:
        del index
        B, T, G, M, K = q_BTGMK.shape
        heads = [(b, g) for b in range(B) for g in range(G)]

        # One plain matmul a row and kv head: XLA:CPU runs a batched one on a single thread (measured: 2.8x the CPU time).
        def one(b: int, g: int) -> jax.Array:
            q_XK = q_BTGMK[b, :, g].swapaxes(0, 1).reshape(M * T, K)
            score_MTS = (q_XK @ k_BTGK[b, :, g].T).reshape(M, T, T) * K**-0.5
            p_MTS = jax.nn.softmax(jnp.where(visible_BTS[b], score_MTS, MASKED), axis=-1)
            return (p_MTS.reshape(M * T, T) @ v_BTGK[b, :, g]).reshape(M, T, K).swapaxes(0, 1)

        return jnp.stack([one(b, g) for b, g in heads], axis=1).reshape(T, B, G, M, K).swapaxes(0, 1), cache

    return attend


@struct.dataclass
class SlotCache:
    """Keys and values of Z slots, each up to S tokens. Keys lie as [K, S]: decoding is bound by how the cache is read, and
    XLA:CPU reads this layout several times faster than [S, K]."""

    k: Any  # [L, Z, G, K, S]
    v: Any  # [L, Z, G, S, K]


def empty_cache(config: ModelConfig, num_slots: int, num_tokens: int) -> SlotCache:
    L, G, K = config.num_layers, config.num_kv_heads, config.head_dim
    return SlotCache(
        k=jnp.zeros((L, num_slots, G, K, num_tokens), jnp.float32),
        v=jnp.zeros((L, num_slots, G, num_tokens, K), jnp.float32),
    )


def cached_decode(slot_B: jax.Array, position_B: jax.Array, num_tokens: int) -> Attend:
    """One new token in each of B slots (T = 1): writes its key and value, then reads the first `num_tokens` of the slot."""

    def attend(index: jax.Array, cache: SlotCache, q_BTGMK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array) -> tuple:
        # Written before it is read: then the donated cache is updated in place instead of copied.
        k = cache.k.at[index, slot_B, :, :, position_B].set(k_BTGK[:, 0])
        v = cache.v.at[index, slot_B, :, position_B, :].set(v_BTGK[:, 0])
        k_BGKS = k[index, :, :, :, :num_tokens][slot_B]
        v_BGSK = v[index, :, :, :num_tokens][slot_B]
        score_BGMS = jnp.einsum("bgmk,bgks->bgms", q_BTGMK[:, 0], k_BGKS) * q_BTGMK.shape[-1] ** -0.5
        visible_BS = jnp.arange(num_tokens)[None, :] <= position_B[:, None]
        p_BGMS = jax.nn.softmax(jnp.where(visible_BS[:, None, None], score_BGMS, MASKED), axis=-1)
        return jnp.einsum("bgms,bgsk->bgmk", p_BGMS, v_BGSK)[:, None], SlotCache(k=k, v=v)

    return attend


def cached_prefill(slot_B: jax.Array, start_B: jax.Array, num_tokens: int) -> Attend:
    """B blocks of T neighbouring tokens, each at positions start..start+T-1 of a slot; blocks may share a slot.

    All are written, then all read what their slot holds up to their own tokens. Tokens of a block beyond its prompt write
    garbage after it; no query sees it before a real token overwrites it.
    """

    def attend(index: jax.Array, cache: SlotCache, q_BTGMK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array) -> tuple:
        B, T = q_BTGMK.shape[:2]
        k, v = cache.k, cache.v
        for b in range(B):
            k = jax.lax.dynamic_update_slice(
                k, k_BTGK[b].transpose(1, 2, 0)[None, None], (index, slot_B[b], 0, 0, start_B[b])
            )
            v = jax.lax.dynamic_update_slice(
                v, v_BTGK[b].swapaxes(0, 1)[None, None], (index, slot_B[b], 0, start_B[b], 0)
            )

        # One block at a time: in a batched product a block's bits depend on how many blocks there are.
        def one(b: int) -> jax.Array:
            k_GKS, v_GSK = k[index, slot_B[b], :, :, :num_tokens], v[index, slot_B[b], :, :num_tokens]
            score_GMTS = jnp.einsum("tgmk,gks->gmts", q_BTGMK[b], k_GKS) * q_BTGMK.shape[-1] ** -0.5
            visible_TS = jnp.arange(num_tokens)[None, :] <= start_B[b] + jnp.arange(T)[:, None]
            p_GMTS = jax.nn.softmax(jnp.where(visible_TS, score_GMTS, MASKED), axis=-1)
            return jnp.einsum("gmts,gsk->tgmk", p_GMTS, v_GSK)

        return jnp.stack([one(b) for b in range(B)]), SlotCache(k=k, v=v)

    return attend
