"""A policy small enough to check by hand: two layers of width 32 over 64 tokens, and a chat format of 258 tokens."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from postrl.policy.chat import ChatFormat
from postrl.policy.model import Adapter, ModelConfig, Params, adapter_specs, param_specs
from postrl.policy.spec import ArraySpec

MODEL = ModelConfig(
    num_layers=2, model_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, ffw_dim=48, vocab_size=64, rope_theta=100.0
)
RANK = 3
ADAPTER_SCALE = 0.7


@functools.cache
def tiny_params(seed: int = 0) -> Params:
    """Random parameters, norm weights included, so that a norm left out or swapped shows."""
    return _random(param_specs(MODEL), seed)


@functools.cache
def tiny_adapter(seed: int = 0) -> Adapter:
    """An adapter with both factors away from zero, so that it changes the policy."""
    return _random(adapter_specs(MODEL, RANK), 100 + seed)


def _random(specs, seed: int):
    """Matrices of unit gain; vectors (all are norm weights) around 1."""
    rng = np.random.default_rng(seed)

    def array(spec: ArraySpec) -> jax.Array:
        is_norm = spec.logical_axes[-1] is None
        draw = rng.normal(1.0, 0.1, spec.shape) if is_norm else rng.normal(0.0, MODEL.model_dim**-0.5, spec.shape)
        return jnp.asarray(draw, jnp.float32)

    with jax.ensure_compile_time_eval():  # cached, so real arrays even when first asked for inside a traced function
        return jax.tree.map(array, specs, is_leaf=lambda node: isinstance(node, ArraySpec))


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def tiny_chat(template: str = CHATML) -> ChatFormat:
    """Bytes as tokens (byte-level BPE without merges) and ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return ChatFormat(tokenizer, template, bos_token="<|im_start|>", eos_token="<|im_end|>")


def row_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def rotated(x_K, position, theta):
    """Dim i and dim i + K/2 are the two coordinates of a point turned by position * theta^(-2i/K)."""
    half = len(x_K) // 2
    out = np.empty_like(x_K)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_K))
        point = (x_K[i] + 1j * x_K[i + half]) * np.exp(1j * angle)
        out[i], out[i + half] = point.real, point.imag
    return out


def reference_logits(
    config: ModelConfig, params: Params, token_T, *, adapter: Adapter | None = None, scale: float = 0.0
):
    """float64 logits [T, V] of one plain sequence, token by token and head by head: the oracle of `model.forward`."""
    f = functools.partial(np.asarray, dtype=np.float64)
    T, K, M = len(token_T), config.head_dim, config.num_heads // config.num_kv_heads
    embed = f(params.embed)

    def weight(name, layer):
        w = f(getattr(params.layers, name))[layer]
        if adapter is not None:
            pair = getattr(adapter, name)
            w = w + scale * f(pair.b)[layer] @ f(pair.a)[layer]
        return w

    x = [embed[t] for t in token_T]
    for layer in range(config.num_layers):
        norm = f(params.layers.attn_norm)[layer]
        y = [row_norm(x_D, norm, config.norm_eps) for x_D in x]
        q, k, v = ([(weight(n, layer) @ y_D).reshape(-1, K) for y_D in y] for n in ("wq", "wk", "wv"))
        for t in range(T):
            heads = []
            for h in range(config.num_heads):
                query = rotated(q[t][h], t, config.rope_theta)
                scores = [query @ rotated(k[s][h // M], s, config.rope_theta) / np.sqrt(K) for s in range(t + 1)]
                p = np.exp(np.array(scores) - max(scores))
                p /= p.sum()
                heads.append(sum(p[s] * v[s][h // M] for s in range(t + 1)))
            x[t] = x[t] + weight("wo", layer) @ np.concatenate(heads)
        norm = f(params.layers.ffw_norm)[layer]
        for t in range(T):
            y_D = row_norm(x[t], norm, config.norm_eps)
            gate, up = weight("w_gate", layer) @ y_D, weight("w_up", layer) @ y_D
            x[t] = x[t] + weight("w_down", layer) @ (gate / (1 + np.exp(-gate)) * up)
    return np.stack([embed @ row_norm(x_D, f(params.final_norm), config.norm_eps) for x_D in x])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
