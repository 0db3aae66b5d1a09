"""Who sees whom in a packed row, and the two cached forms against the packed one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from postrl.policy.attention import cached_decode, cached_prefill, empty_cache, packed, segment_mask
from postrl.policy.model import forward
from tests.policy.tiny import ADAPTER_SCALE, MODEL, tiny_adapter, tiny_params


def test_segment_mask_by_hand():
    """A prompt (1) of two tokens, two episodes (2, 3) behind it, a lone prompt (4) with an episode (5), and padding."""
    segment = jnp.array([[1, 1, 2, 2, 3, 4, 5, 0, 0]])
    parent = jnp.array([[-1, -1, 1, 1, 1, -1, 4, -1, -1]])
    wanted = [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(segment_mask(segment, parent)[0], np.array(wanted, bool))


def test_packed_attention_by_hand():
    """One kv head of two dims, two query heads; the second token weighs both values by the softmax of q k / sqrt(2)."""
    q = jnp.array([[0.0, 0.0], [1.0, 2.0]]).reshape(1, 2, 1, 1, 2) * jnp.array([1.0, -1.0]).reshape(1, 1, 1, 2, 1)
    k = jnp.array([[1.0, 0.0], [0.0, 1.0]]).reshape(1, 2, 1, 2)
    v = jnp.array([[10.0, 0.0], [0.0, 10.0]]).reshape(1, 2, 1, 2)
    out, _ = packed(jnp.tril(jnp.ones((1, 2, 2), bool)))(jnp.int32(0), None, q, k, v)
    for head, sign in enumerate((1, -1)):
        p = np.exp(sign * np.array([1, 2]) / np.sqrt(2))
        p /= p.sum()
        np.testing.assert_allclose(out[0, :, 0, head], [[10, 0], 10 * p], rtol=1e-6)


def test_padding_gives_numbers_not_nan():
    """A row that nothing is visible to."""
    x = jnp.ones((1, 2, 1, 1, 4))
    out, _ = packed(jnp.zeros((1, 2, 2), bool))(jnp.int32(0), None, x, x[:, :, :, 0], x[:, :, :, 0])
    assert np.isfinite(out).all()


@pytest.fixture(scope="module")
def sequence():
    """Tokens and the activations of the packed forward."""
    token_T = np.random.default_rng(2).integers(0, MODEL.vocab_size, 13).astype(np.int32)
    attend = packed(jnp.tril(jnp.ones((1, 13, 13), bool)))
    h, _ = jax.jit(lambda: _forward(token_T[None], np.arange(13)[None], attend))()
    return token_T, np.asarray(h[0])


def _forward(token_BT, position_BT, attend, cache=None):
    return forward(
        MODEL,
        tiny_params(),
        tiny_adapter(),
        ADAPTER_SCALE,
        jnp.asarray(token_BT),
        jnp.asarray(position_BT),
        attend,
        cache,
    )


def test_chunked_prefill_then_decode_equals_the_packed_forward(sequence):
    """Chunks of 4 (the last one half empty), then one token at a time, in slot 2 of 3 beside other sequences."""
    token_T, wanted = sequence
    cache = empty_cache(MODEL, num_slots=3, num_tokens=24)
    step = jax.jit(
        lambda cache, token, start_B: _forward(
            token, start_B[:, None] + jnp.arange(4), cached_prefill(jnp.array([0, 2]), start_B, 16), cache
        )
    )
    got = []
    for start, real in ((0, 4), (4, 4), (8, 2)):
        chunk = np.full(4, 63, np.int32)
        chunk[:real] = token_T[start : start + real]
        h, cache = step(cache, np.stack([chunk[::-1], chunk]), np.array([1, start], np.int32))
        got.append(h[1, :real])

    @jax.jit
    def decode(cache, token_B, position_B):
        slot_B = jnp.array([2, 0])
        return _forward(token_B[:, None], position_B[:, None], cached_decode(slot_B, position_B, 16), cache)

    for t in range(10, 13):
        h, cache = decode(cache, np.array([token_T[t], 5], np.int32), np.array([t, t - 10], np.int32))
        got.append(h[0])
    np.testing.assert_allclose(np.concatenate(got), wanted, atol=1e-5, rtol=0)


def test_a_step_writes_its_own_slots_only(sequence):
    token_T, _ = sequence
    before = jax.tree.map(lambda x: x + 7.0, empty_cache(MODEL, num_slots=3, num_tokens=24))
    step = jax.jit(
        lambda cache: _forward(
            token_T[:4][None], np.arange(4)[None] + 8, cached_prefill(jnp.array([1]), jnp.array([8]), 16), cache
        )[1]
    )
    after = step(before)
    for old, new, axis in ((before.k, after.k, 4), (before.v, after.v, 3)):
        changed = np.argwhere(np.asarray(old != new))
        assert set(changed[:, 1]) == {1}
        assert set(changed[:, axis]) == {8, 9, 10, 11}
        assert set(changed[:, 0]) == {0, 1}
