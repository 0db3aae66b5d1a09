"""The operations of the forward, each in plain JAX and, on CPUs, as a kernel of `postrl.policy.native`.

The plain form is the definition, the reference of the tests, the derivative, and what runs on GPUs and TPUs. The kernels give
each token the same bits whatever else is in the call; XLA's code doesn't (on a GPU or TPU the audit measures by how much).
Which one runs is decided where a program is lowered, so that a CPU can compile for a TPU.

Shapes: T tokens, D model, N outputs, K inputs or head dim, G kv heads, M query heads a kv head, S kv tokens, R rank, V vocab,
P pages of `PAGE_SIZE` tokens, L layers. `layer` picks one of a stack, which a kernel reads in place. Of T rows the first
`count` are real; a kernel leaves the others out and gives 0 for them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from postrl.policy import native
from postrl.policy.sampling import heaviest, sample_inverse_cdf

PAGE_SIZE = 16
"""Tokens of a page: the lanes of the widest vectors of a CPU."""
MASKED = -1e30
"""Finite, so that a row with no visible key (padding) gives numbers, not NaN."""


@functools.cache
def has_kernels() -> bool:
    """Whether this machine's CPU kernels are there. Without them all runs on XLA's own code, slower, and says so once."""
    try:
        native.register()
    except native.BuildError as error:
        warnings.warn(f"no CPU kernels, the policy runs on XLA's own code: {error}", stacklevel=2)
        return False
    return True


def is_exact() -> bool:
    """Whether what runs here gives a token the same bits in training as in sampling."""
    return jax.default_backend() == "cpu" and has_kernels()


def _call(
    name: str, shapes: Any, *operands: jax.Array, aliases: dict[int, int] | None = None, **attributes: Any
) -> Any:
    return jax.ffi.ffi_call(f"postrl_{name}", shapes, input_output_aliases=aliases)(*operands, **attributes)


def _float(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _with_kernel(kernel: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates the plain form: on CPUs `kernel` computes its value; the derivative is the plain form's, computed anew."""

    def decorate(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def call(*operands: Any, **static: Any) -> Any:
            bound = functools.partial(plain, **static)
            if not has_kernels():
                return bound(*operands)

            @jax.custom_vjp
            def op(*operands: Any) -> Any:
                return jax.lax.platform_dependent(*operands, cpu=functools.partial(kernel, **static), default=bound)

            op.defvjp(
                lambda *operands: (op(*operands), operands),
                lambda operands, cotangent: jax.vjp(bound, *operands)[1](cotangent),
            )
            return op(*operands)

        return call

    return decorate


# ------------------------------------------------------------------------------------------------------------ linear maps


def _contract_last(x_TK: jax.Array, w_NK: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x_TK, w_NK, (((1,), (1,)), ((), ())))


def _linear_kernel(x_TK: jax.Array, w_LNK: jax.Array, layer: jax.Array, count: jax.Array) -> jax.Array:
    return _call("linear", _float(x_TK.shape[0], w_LNK.shape[1]), x_TK, w_LNK, layer, count)


@_with_kernel(_linear_kernel)
def linear(x_TK: jax.Array, w_LNK: jax.Array, layer: jax.Array, count: jax.Array) -> jax.Array:
    """y_TN = x_TK @ w_LNK[layer].T. Weights lie [N, K]: both operands are read along their rows."""
    del count
    return _contract_last(x_TK, w_LNK[layer])


def _add_low_rank_kernel(
    y_TN: jax.Array,
    x_TK: jax.Array,
    a_LRK: jax.Array,
    b_LNR: jax.Array,
    layer: jax.Array,
    count: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    z_TR = _linear_kernel(x_TK, a_LRK, layer, count)
    return _call("linear_add", _float(*y_TN.shape), y_TN, z_TR, b_LNR, layer, count, scale=np.float32(scale))


@_with_kernel(_add_low_rank_kernel)
def add_low_rank(
    y_TN: jax.Array,
    x_TK: jax.Array,
    a_LRK: jax.Array,
    b_LNR: jax.Array,
    layer: jax.Array,
    count: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """y_TN + scale * (x_TK @ a.T) @ b.T: what an adapter adds to a linear map (LoRA, arXiv 2106.09685)."""
    del count
    return y_TN + scale * low_rank_map(x_TK, a_LRK[layer], b_LNR[layer])


@jax.custom_vjp
def low_rank_map(x_TK: jax.Array, a_RK: jax.Array, b_NR: jax.Array) -> jax.Array:
    """`(x @ a.T) @ b.T`, float32 [T, N].

    The derivative is written out for one reason: automatic differentiation forms b's gradient as [N, T] x [T, R], for which
    XLA:CPU first transposes the whole [T, N] cotangent (measured: 20 % of a training step).
    """
    return _contract_last(_contract_last(x_TK, a_RK), b_NR)


def _low_rank_forward(x_TK: jax.Array, a_RK: jax.Array, b_NR: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    z_TR = _contract_last(x_TK, a_RK)
    return _contract_last(z_TR, b_NR), (x_TK, z_TR, a_RK, b_NR)


def _low_rank_backward(saved: tuple[jax.Array, ...], dy_TN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x_TK, z_TR, a_RK, b_NR = saved
    dz_TR = dy_TN @ b_NR
    return dz_TR @ a_RK, dz_TR.T @ x_TK, (z_TR.T @ dy_TN).T


low_rank_map.defvjp(_low_rank_forward, _low_rank_backward)


# ------------------------------------------------------------------------------------------------ norm, activation, softmax


def _rms_norm_kernel(
    x_TD: jax.Array, weight_LD: jax.Array, layer: jax.Array, count: jax.Array, *, eps: float
) -> jax.Array:
    return _call("rms_norm", _float(*x_TD.shape), x_TD, weight_LD, layer, count, eps=np.float32(eps))


@_with_kernel(_rms_norm_kernel)
def rms_norm(x_TD: jax.Array, weight_LD: jax.Array, layer: jax.Array, count: jax.Array, *, eps: float) -> jax.Array:
    """Root mean square norm (arXiv 1910.07467)."""
    del count
    return x_TD * jax.lax.rsqrt(jnp.mean(x_TD * x_TD, axis=-1, keepdims=True) + eps) * weight_LD[layer]


@_with_kernel(lambda gate_TF, up_TF, count: _call("swiglu", _float(*gate_TF.shape), gate_TF, up_TF, count))
def swiglu(gate_TF: jax.Array, up_TF: jax.Array, count: jax.Array) -> jax.Array:
    """silu(gate) * up (arXiv 2002.05202)."""
    del count
    return jax.nn.silu(gate_TF) * up_TF


def _log_probability_kernel(logits_NV: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = _float(logits_NV.shape[0])
    logprob_N, logz_N = _call("log_probability", (shape, shape), logits_NV, *others)
    return logprob_N, logz_N


@_with_kernel(_log_probability_kernel)
def log_probability(
    logits_NV: jax.Array, inverse_temperature_N: jax.Array, target_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Of each row's target under softmax(logits / temperature), and the logarithm of what that divides by."""
    scaled_NV = logits_NV * inverse_temperature_N[:, None]
    logz_N = jax.nn.logsumexp(scaled_NV, axis=-1)
    return jnp.take_along_axis(scaled_NV, target_N[:, None], axis=-1)[:, 0] - logz_N, logz_N


def _sample_kernel(logits_NV: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array]:
    N = logits_NV.shape[0]
    token_N, logprob_N = _call("sample", (jax.ShapeDtypeStruct((N,), jnp.int32), _float(N)), logits_NV, *others)
    return token_N, logprob_N


@_with_kernel(_sample_kernel)
def sample(
    logits_NV: jax.Array, inverse_temperature_N: jax.Array, uniform_N: jax.Array, count: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A token of each row and its log-probability, from one uniform number in [0, 1) each; a negative one: greedily."""
    del count
    scaled_NV = logits_NV * inverse_temperature_N[:, None]
    token_N = jnp.where(uniform_N < 0, heaviest(scaled_NV), sample_inverse_cdf(scaled_NV, uniform_N))
    token_N = token_N.astype(jnp.int32)
    return token_N, log_probability.__wrapped__(logits_NV, inverse_temperature_N, token_N)[0]


# -------------------------------------------------------------------------------------------------------------- attention


def _rope_angles_kernel(position_T: jax.Array, *, theta: float, head_dim: int) -> tuple[jax.Array, jax.Array]:
    shape = _float(position_T.shape[0], head_dim // 2)
    cosine, sine = _call("rope_angles", (shape, shape), position_T, theta=np.float32(theta))
    return cosine, sine


@_with_kernel(_rope_angles_kernel)
def rope_angles(position_T: jax.Array, *, theta: float, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary positions (arXiv 2104.09864), float32 [T, K/2] each."""
    half = head_dim // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_TK = position_T[:, None].astype(jnp.float32) * frequency_K
    return jnp.cos(angle_TK), jnp.sin(angle_TK)


def rotate(x: jax.Array, cosine_TK: jax.Array, sine_TK: jax.Array) -> jax.Array:
    """Rotary positions of x [T, ..., K]; dim i is paired with dim i + K/2."""
    half = x.shape[-1] // 2
    shape = (x.shape[0], *[1] * (x.ndim - 2), half)
    cosine, sine = cosine_TK.reshape(shape), sine_TK.reshape(shape)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _packed_attention_kernel(q_TGMK: jax.Array, *others: jax.Array) -> jax.Array:
    return _call("packed_attention", _float(*q_TGMK.shape), q_TGMK, *others)


@_with_kernel(_packed_attention_kernel)
def packed_attention(
    q_TGMK: jax.Array,
    k_TGK: jax.Array,
    v_TGK: jax.Array,
    cosine_TK: jax.Array,
    sine_TK: jax.Array,
    segment_T: jax.Array,
    parent_T: jax.Array,
) -> jax.Array:
    """o_TGMK inside a packed row: a token sees its segment's parent, and its own segment up to itself.

    Segment 0 is padding; what it gives means nothing. Tokens of a segment stand side by side.
    """
    T, G, M, K = q_TGMK.shape
    q_TGMK, k_TGK = rotate(q_TGMK, cosine_TK, sine_TK), rotate(k_TGK, cosine_TK, sine_TK)
    visible_TS = packed_mask(segment_T, parent_T)

    # One plain matmul a kv head: XLA:CPU runs a batched one on a single thread (measured: 2.8x the CPU time).
    def one(g: int) -> jax.Array:
        q_XK = q_TGMK[:, g].swapaxes(0, 1).reshape(M * T, K)
        score_MTS = (q_XK @ k_TGK[:, g].T).reshape(M, T, T) * K**-0.5
        p_MTS = jax.nn.softmax(jnp.where(visible_TS, score_MTS, MASKED), axis=-1)
        return (p_MTS.reshape(M * T, T) @ v_TGK[:, g]).reshape(M, T, K).swapaxes(0, 1)

    return jnp.stack([one(g) for g in range(G)], axis=1)


def packed_mask(segment_T: jax.Array, parent_T: jax.Array) -> jax.Array:
    """visible_TS of a packed row: earlier tokens of the own segment and of the segment's parent. Padding sees padding."""
    T = segment_T.shape[0]
    causal_TS = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    own_TS = segment_T[:, None] == segment_T[None, :]
    parents_TS = parent_T[:, None] == segment_T[None, :]
    return causal_TS & (own_TS | parents_TS)


def _paged_attention_kernel(q_TGMK: jax.Array, *others: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys, values = others[-3:-1]
    shapes = (_float(*q_TGMK.shape), _float(*keys.shape), _float(*values.shape))
    o_TGMK, keys, values = _call("paged_attention", shapes, q_TGMK, *others, aliases={8: 1, 9: 2})
    return o_TGMK, keys, values


@_with_kernel(_paged_attention_kernel)
def paged_attention(
    q_TGMK: jax.Array,
    k_TGK: jax.Array,
    v_TGK: jax.Array,
    cosine_TK: jax.Array,
    sine_TK: jax.Array,
    sequence_T: jax.Array,
    position_T: jax.Array,
    table_NP: jax.Array,
    key_LPGKS: jax.Array,
    value_LPGSK: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o_TGMK over a paged cache, and the cache with the T new tokens written into it.

    `sequence_T` is a token's row of the table, -1 for padding; tokens of a sequence stand side by side, in order. Row n of
    `table_NP` has the pages of sequence n in order. A page holds keys as [K, 16] and values as [16, K'] (K' is K, filled up to
    a multiple of 16); the last page of the cache takes what padding writes.
    """
    T, G, M, K = q_TGMK.shape
    width = value_LPGSK.shape[-1]
    q_TGMK, k_TGK = rotate(q_TGMK, cosine_TK, sine_TK), rotate(k_TGK, cosine_TK, sine_TK)
    page_T = table_NP[sequence_T, position_T // PAGE_SIZE]
    page_T = jnp.where(sequence_T < 0, key_LPGKS.shape[1] - 1, page_T)
    lane_T = position_T % PAGE_SIZE
    # Written before it is read: then the donated cache is updated in place instead of copied.
    key_LPGKS = key_LPGKS.at[layer, page_T, :, :, lane_T].set(k_TGK)
    padded_TGK = jnp.pad(v_TGK, ((0, 0), (0, 0), (0, width - K)))
    value_LPGSK = value_LPGSK.at[layer, page_T, :, lane_T, :].set(padded_TGK)
    table_TP = table_NP[sequence_T]
    key_TPGKS, value_TPGSK = key_LPGKS[layer, table_TP], value_LPGSK[layer, table_TP, ..., :K]
    score_TGMPS = jnp.einsum("tgmk,tpgks->tgmps", q_TGMK, key_TPGKS) * K**-0.5
    seen_TPS = jnp.arange(table_NP.shape[1] * PAGE_SIZE).reshape(1, -1, PAGE_SIZE) <= position_T[:, None, None]
    score_TGMX = jnp.where(seen_TPS[:, None, None], score_TGMPS, MASKED).reshape(T, G, M, -1)
    p_TGMPS = jax.nn.softmax(score_TGMX, axis=-1).reshape(score_TGMPS.shape)
    return jnp.einsum("tgmps,tpgsk->tgmk", p_TGMPS, value_TPGSK), key_LPGKS, value_LPGSK
