"""The policy: a decoder-only transformer as data and functions, one traced forward for training, scoring and sampling.

Parameters are `flax.struct` dataclasses that hold arrays only; layers are stacked on the first dim and run by
`lax.scan`. What differs between training and sampling is how queries meet keys, so attention is a value: `attend`.

Shapes: B rows, T tokens, S kv tokens, D model, H query heads, G kv heads, M = H/G, K head dim, F ffw, V vocab, L layers,
R rank. Weights are stored [N, K]: the contraction runs over the last axis of both operands, which XLA:CPU's matmul
treats alike for any number of rows; so a token's activations do not depend on what else is in the batch.

Architecture: Llama (arXiv 2302.13971): RMSNorm (1910.07467), rotary positions (2104.09864, half-split pairs), SwiGLU
(2002.05202), grouped-query attention (2305.13245). Low-rank adapters: LoRA (2106.09685).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from postrl.policy.spec import ArraySpec, normal, ones, zeros

T = TypeVar("T")


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffw_dim: int
    vocab_size: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: rotary positions turn pairs")


@struct.dataclass
class Layers:
    """All layers, stacked on the first dim."""

    attn_norm: Any  # [L, D]
    wq: Any  # [L, H*K, D]
    wk: Any  # [L, G*K, D]
    wv: Any  # [L, G*K, D]
    wo: Any  # [L, D, H*K]
    ffw_norm: Any  # [L, D]
    w_gate: Any  # [L, F, D]
    w_up: Any  # [L, F, D]
    w_down: Any  # [L, D, F]


@struct.dataclass
class Params:
    embed: Any  # [V, D]; the head is tied to it
    layers: Any  # Layers, or a tuple of them, one a layer, without L
    final_norm: Any  # [D]


@struct.dataclass
class LowRank:
    """One adapter pair: `x @ (a.T @ b.T)` is added to `x @ w.T`. b starts at zero, so the adapted policy starts as the base."""

    a: Any  # [L, R, in]
    b: Any  # [L, out, R]


@struct.dataclass
class Adapter:
    """A LoRA pair for every linear map of every layer."""

    wq: LowRank
    wk: LowRank
    wv: LowRank
    wo: LowRank
    w_gate: LowRank
    w_up: LowRank
    w_down: LowRank


LINEAR_MAPS = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")


def param_specs(config: ModelConfig) -> Params:
    L, D, F = config.num_layers, config.model_dim, config.ffw_dim
    HK, GK = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    stddev = D**-0.5
    # Residual branches are scaled down with depth, so that the stream's variance stays that of the embedding (GPT-2).
    out = normal(stddev * (2 * L) ** -0.5)

    def linear(rows: int, cols: int, row_axis: str, col_axis: str, initializer: Any) -> ArraySpec:
        return ArraySpec((L, rows, cols), ("layers", row_axis, col_axis), initializer)

    return Params(
        embed=ArraySpec((config.vocab_size, D), ("vocab", "model"), normal(stddev)),
        layers=Layers(
            attn_norm=ArraySpec((L, D), ("layers", None), ones),
            wq=linear(HK, D, "heads", "model", normal(stddev)),
            wk=linear(GK, D, "kv_heads", "model", normal(stddev)),
            wv=linear(GK, D, "kv_heads", "model", normal(stddev)),
            wo=linear(D, HK, "model", "heads", out),
            ffw_norm=ArraySpec((L, D), ("layers", None), ones),
            w_gate=linear(F, D, "ffw", "model", normal(stddev)),
            w_up=linear(F, D, "ffw", "model", normal(stddev)),
            w_down=linear(D, F, "model", "ffw", out),
        ),
        final_norm=ArraySpec((D,), (None,), ones),
    )


def adapter_specs(config: ModelConfig, rank: int) -> Adapter:
    specs = param_specs(config).layers
    pairs = {}
    for name in LINEAR_MAPS:
        (L, out_dim, in_dim), (_, out_axis, in_axis) = getattr(specs, name).shape, getattr(specs, name).logical_axes
        pairs[name] = LowRank(
            a=ArraySpec((L, rank, in_dim), ("layers", "rank", in_axis), normal(in_dim**-0.5)),
            b=ArraySpec((L, out_dim, rank), ("layers", out_axis, "rank"), zeros),
        )
    return Adapter(**pairs)


Attend = Callable[[jax.Array, Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(layer index, cache, q_BTGMK, k_BTGK, v_BTGK) -> (o_BTGMK, cache). The cache is None where nothing is cached."""


def forward(
    config: ModelConfig,
    params: Params,
    adapter: Adapter | tuple[Adapter, ...] | None,
    adapter_scale: float,
    token_BT: jax.Array,
    position_BT: jax.Array,
    attend: Attend,
    cache: Any = None,
    *,
    remat: bool = False,
) -> tuple[jax.Array, Any]:
    """Final normed activations h_BTD and the cache; `logits` turns the rows that are needed into logits.

    `remat`: a gradient keeps the inputs of the layers and the outputs of their linear maps, and computes the rest again (arXiv
    1604.06174).

    Layers are scanned, or, where they come `unstacked`, run one after another: that is more to compile, and on CPU less to do,
    since a scan copies each layer's weights out of the stack.
    """

    def layer(carry: tuple[jax.Array, Any], xs: Any) -> tuple[tuple[jax.Array, Any], None]:
        (x_BTD, cache), (index, weights, pairs) = carry, xs
        with jax.named_scope("attention"):
            y_BTD = rms_norm(x_BTD, weights.attn_norm, config.norm_eps)
            q_BTHK = _heads(_linear("wq", weights, pairs, adapter_scale, y_BTD), config.head_dim)
            k_BTGK = _heads(_linear("wk", weights, pairs, adapter_scale, y_BTD), config.head_dim)
            v_BTGK = _heads(_linear("wv", weights, pairs, adapter_scale, y_BTD), config.head_dim)
            q_BTHK = rotate(q_BTHK, position_BT, config.rope_theta)
            k_BTGK = rotate(k_BTGK, position_BT, config.rope_theta)
            q_BTGMK = q_BTHK.reshape(*k_BTGK.shape[:3], -1, config.head_dim)
            o_BTGMK, cache = attend(index, cache, q_BTGMK, k_BTGK, v_BTGK)
            o_BTD = o_BTGMK.reshape(*x_BTD.shape[:2], -1)
            x_BTD = x_BTD + _linear("wo", weights, pairs, adapter_scale, o_BTD)
        with jax.named_scope("ffw"):
            y_BTD = rms_norm(x_BTD, weights.ffw_norm, config.norm_eps)
            gate_BTF = _linear("w_gate", weights, pairs, adapter_scale, y_BTD)
            up_BTF = _linear("w_up", weights, pairs, adapter_scale, y_BTD)
            x_BTD = x_BTD + _linear("w_down", weights, pairs, adapter_scale, jax.nn.silu(gate_BTF) * up_BTF)
        return (x_BTD, cache), None

    indices, carry = jnp.arange(config.num_layers), (params.embed[token_BT], cache)
    if isinstance(params.layers, Layers):
        # A scan's body is a computation of its own, which XLA can't merge with the one that repeats it: no barriers needed.
        keep = jax.checkpoint_policies.save_only_these_names("linear")
        body = jax.checkpoint(layer, prevent_cse=False, policy=keep) if remat else layer
        carry, _ = jax.lax.scan(body, carry, (indices, params.layers, adapter))
    else:
        assert adapter is None or isinstance(adapter, tuple), "unstacked layers need an unstacked adapter"
        for i, weights in enumerate(params.layers):
            carry, _ = layer(carry, (indices[i], weights, adapter[i] if adapter is not None else None))
    x_BTD, cache = carry
    return rms_norm(x_BTD, params.final_norm, config.norm_eps), cache


def unstacked(layers: T) -> tuple[T, ...]:
    """The layers of a stack (weights or adapter), each with arrays of its own."""
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    return tuple(jax.tree.map(lambda x, i=i: jnp.copy(x[i]), layers) for i in range(num_layers))


def logits(params: Params, h_ND: jax.Array) -> jax.Array:
    """logits_NV of the given rows of activations."""
    return _contract_last(h_ND, params.embed)


def rms_norm(x_BTD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    return x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True) + eps) * weight_D


def rotate(x_BTHK: jax.Array, position_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary positions; dim i is paired with dim i + K/2."""
    half = x_BTHK.shape[-1] // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1K = position_BT[:, :, None, None].astype(jnp.float32) * frequency_K
    cos, sin = jnp.cos(angle_BT1K), jnp.sin(angle_BT1K)
    first, second = x_BTHK[..., :half], x_BTHK[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _heads(x_BTN: jax.Array, head_dim: int) -> jax.Array:
    return x_BTN.reshape(*x_BTN.shape[:2], -1, head_dim)


def _contract_last(x: jax.Array, weight_NK: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight_NK, (((x.ndim - 1,), (1,)), ((), ())))


def _linear(name: str, weights: Layers, pairs: Adapter | None, scale: float, x: jax.Array) -> jax.Array:
    y = _contract_last(x, getattr(weights, name))
    if pairs is not None:
        pair: LowRank = getattr(pairs, name)
        y = y + scale * low_rank_map(x.reshape(-1, x.shape[-1]), pair.a, pair.b).reshape(y.shape)
    return checkpoint_name(y, "linear")


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
