"""What the engine must give: one sequence at a time, without a cache, by the same forward; and a small engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from postrl.policy.attention import packed
from postrl.policy.model import forward, logits
from postrl.rollout.engine import Engine, EngineConfig
from postrl.rollout.sampling import sample_inverse_cdf
from tests.policy.tiny import ADAPTER_SCALE, MODEL, log_softmax, tiny_adapter, tiny_params

CONFIG = EngineConfig(
    num_slots=10, max_context=40, prefill_buckets=(2, 4), row_buckets=(8, 16), context_buckets=(20, 40)
)
NO_EOS = MODEL.vocab_size + 1
"""An end token that is never sampled."""


def small_engine(*, eos_id: int = NO_EOS, config: EngineConfig = CONFIG, seed: int = 0) -> Engine:
    return Engine(MODEL, tiny_params(), tiny_adapter(seed), ADAPTER_SCALE, eos_id, config)


@jax.jit
def _next_logits(adapter, token_T, position):
    """Logits at `position` of a padded sequence."""
    T = token_T.shape[0]
    attend = packed(jnp.tril(jnp.ones((1, T, T), bool)))
    h, _ = forward(MODEL, tiny_params(), adapter, ADAPTER_SCALE, token_T[None], jnp.arange(T)[None], attend)
    return logits(tiny_params(), h[0])[position]


def plain_sample(prompt, num_tokens: int, *, temperature: float = 0.0, seed: int = 0, adapter_seed: int = 0):
    """(tokens, log-probabilities) of a loop that computes the whole sequence again for every token."""
    context = np.zeros(CONFIG.max_context, np.int32)
    context[: len(prompt)] = prompt
    tokens, logprobs = [], []
    for t in range(len(prompt) - 1, len(prompt) - 1 + num_tokens):
        logits_V = np.asarray(_next_logits(tiny_adapter(adapter_seed), context, t))
        scaled_V = logits_V / np.float32(temperature) if temperature else logits_V
        if temperature:
            uniform = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), t))
            token = int(sample_inverse_cdf(jnp.asarray(scaled_V)[None], uniform[None])[0])
        else:
            token = int(np.argmax(logits_V))
        tokens.append(token)
        logprobs.append(log_softmax(scaled_V.astype(np.float64))[token])
        if t + 1 < CONFIG.max_context:
            context[t + 1] = token
    return np.array(tokens), np.array(logprobs)
