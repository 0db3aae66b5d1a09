"""What the engine must give: one sequence at a time, without a cache, by the same forward; and a small engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from postrl.contracts import Completion
from postrl.policy.attention import packed
from postrl.policy.model import forward, inverse_temperature, logits
from postrl.policy.ops import has_kernels
from postrl.policy.sampling import sample_inverse_cdf
from postrl.rollout.engine import Engine, EngineConfig
from tests.policy.tiny import ADAPTER_SCALE, MODEL, log_softmax, tiny_adapter, tiny_params

CONFIG = EngineConfig(max_requests=10, max_context=80, num_pages=60, max_step_tokens=32)
NO_EOS = MODEL.vocab_size + 1
"""An end token that is never sampled."""
TIMEOUT_S = 600


def small_engine(*, eos_id: int = NO_EOS, config: EngineConfig = CONFIG, seed: int = 0) -> Engine:
    return Engine(MODEL, tiny_params(), tiny_adapter(seed), ADAPTER_SCALE, eos_id, config)


def sample_in(engine, prompt, *, seed=0, temperature=0.0, max_new_tokens=6) -> Completion:
    future = engine.submit(np.asarray(prompt), seed=seed, temperature=temperature, max_new_tokens=max_new_tokens)
    return future.result(TIMEOUT_S)


def until(holds: Callable[[], bool]) -> None:
    """Waits for what another thread is about to do."""
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


class Gate:
    """Stands in for an engine's compiled step: computes, but stops before the given step until `open` is set."""

    def __init__(self, engine: Engine, *, before_step: int, compute: Callable | None = None):
        self.reached, self.open = threading.Event(), threading.Event()
        self.compute, self._left = compute or engine._compute, before_step
        engine._compute = self  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, *operands):
        if self._left == 0:
            self.reached.set()
            assert self.open.wait(TIMEOUT_S)
        self._left -= 1
        return self.compute(*operands)


def assert_same_bits(got, wanted) -> None:
    """Of log-probabilities, where the kernels run; XLA's own code keeps no bits across companies."""
    if has_kernels():
        np.testing.assert_array_equal(got, wanted)
    else:
        np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)


def assert_same(got: Completion, wanted: Completion) -> None:
    np.testing.assert_array_equal(got.token_T, wanted.token_T)
    assert_same_bits(got.logprob_T, wanted.logprob_T)


@jax.jit
def _next_logits(adapter, token_T, position):
    """Logits at `position` of a padded sequence."""
    T = token_T.shape[0]
    attend = packed(jnp.ones(T, jnp.int32), jnp.full(T, -1, jnp.int32))
    h_TD, _ = forward(MODEL, tiny_params(), adapter, ADAPTER_SCALE, token_T, jnp.arange(T), attend)
    return logits(tiny_params(), h_TD)[position]


def plain_sample(prompt, num_tokens: int, *, temperature: float = 0.0, seed: int = 0, adapter_seed: int = 0):
    """(tokens, log-probabilities) of a loop that computes the whole sequence again for every token."""
    context = np.zeros(CONFIG.max_context, np.int32)
    context[: len(prompt)] = prompt
    tokens, logprobs = [], []
    for t in range(len(prompt) - 1, len(prompt) - 1 + num_tokens):
        scaled_V = np.asarray(_next_logits(tiny_adapter(adapter_seed), context, t)) * inverse_temperature(temperature)
        if temperature:
            uniform = jax.random.uniform(jax.random.fold_in(jax.random.key(seed), t))
            token = int(sample_inverse_cdf(jnp.asarray(scaled_V)[None], uniform[None])[0])
        else:
            token = int(np.argmax(scaled_V))
        tokens.append(token)
        logprobs.append(log_softmax(scaled_V.astype(np.float64))[token])
        if t + 1 < CONFIG.max_context:
            context[t + 1] = token
    return np.array(tokens), np.array(logprobs)
