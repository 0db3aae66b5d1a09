"""The policy: a decoder-only transformer as data and functions, one traced forward for training, scoring and sampling.

Parameters are `flax.struct` dataclasses that hold arrays only; layers are stacked on the first dim and run by
`lax.scan`. What differs between training and sampling is how queries meet keys, so attention is a value: `attend`.

Tokens come flat, [T], with no batch dim: which of them belong together is attention's affair.

Shapes: T tokens, D model, H query heads, G kv heads, M = H/G, K head dim, F ffw, V vocab, L layers, R rank. Weights are
stored [N, K]: both operands of a linear map are read along their rows.

Architecture: Llama (arXiv 2302.13971): RMSNorm (1910.07467), rotary positions (2104.09864, half-split pairs), SwiGLU
(2002.05202), grouped-query attention (2305.13245). Low-rank adapters: LoRA (2106.09685).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from postrl.policy import ops
from postrl.policy.spec import ArraySpec, normal, ones, zeros


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
    layers: Layers
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


Attend = Callable[..., tuple[jax.Array, Any]]
"""(layer, cache, q_TGMK, k_TGK, v_TGK, cosine_TK, sine_TK) -> (o_TGMK, cache). Queries and keys come unrotated; the cache is
None where nothing is cached."""


def forward(
    config: ModelConfig,
    params: Params,
    adapter: Adapter | None,
    adapter_scale: float,
    token_T: jax.Array,
    position_T: jax.Array,
    attend: Attend,
    cache: Any = None,
    *,
    count: jax.Array | None = None,
    differentiable: bool = False,
) -> tuple[jax.Array, Any]:
    """Final normed activations h_TD and the cache; `logits` turns the rows that are needed into logits.

    `count`: how many of the T tokens are real, the first ones; all of them by default.

    `differentiable`: each layer's weights are cut out of their stack, so that a gradient is no larger than a layer; it keeps
    the inputs of the layers and the outputs of their linear maps, and computes the rest again (arXiv 1604.06174): with
    attention's probabilities and the like kept, a step takes three times the memory, and on a CPU, which waits for memory, no
    less time (SmolLM2-135M, rows of 384 and 640 tokens; experiments/LOG.md). Otherwise the layers are read where they lie.
    """
    num_real = jnp.int32(len(token_T)) if count is None else count
    cosine_TK, sine_TK = ops.rope_angles(position_T, theta=config.rope_theta, head_dim=config.head_dim)

    def block(x_TD: jax.Array, cache: Any, index: jax.Array, at: _Layer) -> tuple[jax.Array, Any]:
        with jax.named_scope("attention"):
            y_TD = at.norm("attn_norm", x_TD, config.norm_eps)
            q_TGMK = at.linear("wq", y_TD).reshape(len(x_TD), config.num_kv_heads, -1, config.head_dim)
            k_TGK = at.linear("wk", y_TD).reshape(len(x_TD), config.num_kv_heads, config.head_dim)
            v_TGK = at.linear("wv", y_TD).reshape(len(x_TD), config.num_kv_heads, config.head_dim)
            o_TGMK, cache = attend(index, cache, q_TGMK, k_TGK, v_TGK, cosine_TK, sine_TK)
            x_TD = x_TD + at.linear("wo", o_TGMK.reshape(len(x_TD), -1))
        with jax.named_scope("ffw"):
            y_TD = at.norm("ffw_norm", x_TD, config.norm_eps)
            h_TF = ops.swiglu(at.linear("w_gate", y_TD), at.linear("w_up", y_TD), num_real)
            x_TD = x_TD + at.linear("w_down", h_TF)
        return x_TD, cache

    def sliced(carry: tuple[jax.Array, Any], xs: Any) -> tuple[tuple[jax.Array, Any], None]:
        index, *stacks = xs
        weights, pairs = jax.tree.map(lambda x: x[None], stacks)
        return block(*carry, index, _Layer(weights, pairs, adapter_scale, jnp.int32(0), num_real)), None

    def in_place(carry: tuple[jax.Array, Any], index: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
        return block(*carry, index, _Layer(params.layers, adapter, adapter_scale, index, num_real)), None

    indices, carry = jnp.arange(config.num_layers, dtype=jnp.int32), (params.embed[token_T], cache)
    if differentiable:
        # A scan's body is a computation of its own, which XLA can't merge with the one that repeats it: no barriers needed.
        keep = jax.checkpoint_policies.save_only_these_names("linear")
        body = jax.checkpoint(sliced, prevent_cse=False, policy=keep)
        carry, _ = jax.lax.scan(body, carry, (indices, params.layers, adapter))
    else:
        carry, _ = jax.lax.scan(in_place, carry, indices)
    x_TD, cache = carry
    return ops.rms_norm(x_TD, params.final_norm[None], jnp.int32(0), num_real, eps=config.norm_eps), cache


@dataclass(frozen=True)
class _Layer:
    """One layer's weights and adapter pairs: element `index` of stacks."""

    weights: Layers
    pairs: Adapter | None
    scale: float
    index: jax.Array
    count: jax.Array

    def norm(self, name: str, x_TD: jax.Array, eps: float) -> jax.Array:
        return ops.rms_norm(x_TD, getattr(self.weights, name), self.index, self.count, eps=eps)

    def linear(self, name: str, x_TK: jax.Array) -> jax.Array:
        y_TN = ops.linear(x_TK, getattr(self.weights, name), self.index, self.count)
        if self.pairs is not None:
            pair: LowRank = getattr(self.pairs, name)
            y_TN = ops.add_low_rank(y_TN, x_TK, pair.a, pair.b, self.index, self.count, scale=self.scale)
        return checkpoint_name(y_TN, "linear")


def logits(params: Params, h_ND: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """logits_NV of the given rows of activations, of which the first `count` are real."""
    count = jnp.int32(len(h_ND)) if count is None else count
    return ops.linear(h_ND, params.embed[None], jnp.int32(0), count)


def inverse_temperature(temperature: float) -> np.float32:
    """What logits are multiplied by; 1 for greedy decoding (temperature 0).

    A division by a constant XLA turns into a multiplication, one by an array it doesn't: their bits differ.
    """
    return np.float32(1.0 if temperature == 0 else 1.0 / temperature)
