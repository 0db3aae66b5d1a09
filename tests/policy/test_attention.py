"""Who sees whom in a packed row, and the paged form against the packed one: the same bits, where there are kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.policy import ops
from postrl.policy.attention import empty_cache, packed, paged
from postrl.policy.model import forward, inverse_temperature, logits
from tests.policy.tiny import ADAPTER_SCALE, MODEL, log_softmax, reference_logits, tiny_adapter, tiny_params

TEMPERATURE = 0.8


def test_packed_mask_by_hand():
    """A prompt (1) of two tokens, two episodes (2, 3) behind it, a lone prompt (4) with an episode (5), and padding."""
    segment = jnp.array([1, 1, 2, 2, 3, 4, 5, 0, 0])
    parent = jnp.array([-1, -1, 1, 1, 1, -1, 4, -1, -1])
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
    np.testing.assert_array_equal(ops.packed_mask(segment, parent), np.array(wanted, bool))


def test_packed_attention_by_hand():
    """One kv head of two dims, two query heads; the second token weighs both values by the softmax of q k / sqrt(2)."""
    q = jnp.array([[0.0, 0.0], [1.0, 2.0]]).reshape(2, 1, 1, 2) * jnp.array([1.0, -1.0]).reshape(1, 1, 2, 1)
    k = jnp.array([[1.0, 0.0], [0.0, 1.0]]).reshape(2, 1, 2)
    v = jnp.array([[10.0, 0.0], [0.0, 10.0]]).reshape(2, 1, 2)
    not_turned = jnp.ones((2, 1)), jnp.zeros((2, 1))
    segment = jnp.ones(2, jnp.int32)
    out, _ = packed(segment, -segment)(jnp.int32(0), None, q, k, v, *not_turned)
    for head, sign in enumerate((1, -1)):
        p = np.exp(sign * np.array([1, 2]) / np.sqrt(2))
        p /= p.sum()
        np.testing.assert_allclose(out[:, 0, head], [[10, 0], 10 * p], rtol=1e-6)


def test_queries_and_keys_are_turned_by_their_positions():
    """A quarter turn between them: q k / sqrt(2) of equal vectors is 0, of the own key 4 / sqrt(2)."""
    x = jnp.array([[2.0, 0.0], [2.0, 0.0]]).reshape(2, 1, 1, 2)
    v = jnp.array([[1.0, 0.0], [0.0, 1.0]]).reshape(2, 1, 2)
    cosine, sine = jnp.array([[1.0], [0.0]]), jnp.array([[0.0], [1.0]])
    segment = jnp.ones(2, jnp.int32)
    out, _ = packed(segment, -segment)(jnp.int32(0), None, x, x[:, :, 0], v, cosine, sine)
    p = np.exp([0, 4 / np.sqrt(2)])
    np.testing.assert_allclose(out[1, 0, 0], p / p.sum(), rtol=1e-6)


def test_padding_gives_numbers_not_nan():
    x = jnp.ones((3, 1, 1, 4))
    segment = jnp.array([1, 0, 0], jnp.int32)
    parent = jnp.full(3, -1, jnp.int32)
    out, _ = packed(segment, parent)(jnp.int32(0), None, x, x[:, :, 0], x[:, :, 0], jnp.ones((3, 2)), jnp.ones((3, 2)))
    assert np.isfinite(out).all()


# ------------------------------------------------------------------------------ the whole forward, in both of its forms

NUM_STEP_TOKENS, NUM_PAGES = 40, 12
PROMPT, FIRST, SECOND = (
    np.random.default_rng(n).integers(0, MODEL.vocab_size, n).astype(np.int32) for n in (18, 21, 6)
)
SEQUENCES = (np.concatenate([PROMPT, FIRST]), np.concatenate([PROMPT, SECOND]))


def log_probabilities(h_ND, target_N):
    inverse_N = jnp.full(len(target_N), inverse_temperature(TEMPERATURE))
    return ops.log_probability(logits(tiny_params(), h_ND), inverse_N, target_N)[0]


@functools.partial(jax.jit, static_argnames=("differentiable", "with_gradient"))
def packed_row(adapter, *, differentiable: bool, with_gradient: bool = False):
    """Both sequences as one row of the learner's, behind one prompt, with padding at its end."""
    P, A, B, padding = len(PROMPT), len(FIRST), len(SECOND), 5
    token_T = np.concatenate([PROMPT, FIRST, SECOND, np.full(padding, 7, np.int32)])
    position_T = np.concatenate([np.arange(P + A), P + np.arange(B), np.zeros(padding)])
    segment_T = np.repeat([1, 2, 3, 0], (P, A, B, padding))
    parent_T = np.repeat([-1, 1, 1, -1], (P, A, B, padding))
    source_N = np.concatenate([np.arange(P + A - 1), np.arange(P), np.arange(P + A, P + A + B - 1)])
    target_N = np.concatenate([sequence[1:] for sequence in SEQUENCES])
    token_T, position_T, segment_T, parent_T = (
        jnp.asarray(x, jnp.int32) for x in (token_T, position_T, segment_T, parent_T)
    )

    def score(adapter):
        attend = packed(segment_T, parent_T)
        h_TD, _ = forward(
            MODEL,
            tiny_params(),
            adapter,
            ADAPTER_SCALE,
            token_T,
            position_T,
            attend,
            differentiable=differentiable,
        )
        logprob_N = log_probabilities(h_TD[source_N], target_N)
        return jnp.sum(logprob_N), logprob_N

    if with_gradient:
        (_, logprob_N), gradient = jax.value_and_grad(score, has_aux=True)(adapter)
        return logprob_N, gradient
    return score(adapter)[1], None


def in_row(logprob_N) -> list[np.ndarray]:
    """By sequence."""
    return np.split(np.asarray(logprob_N), [len(SEQUENCES[0]) - 1])


@functools.partial(jax.jit, donate_argnums=0)
def paged_step(cache, token_T, position_T, sequence_T, table_NP, target_T, count):
    attend = paged(sequence_T, position_T, table_NP)
    h_TD, cache = forward(
        MODEL, tiny_params(), tiny_adapter(), ADAPTER_SCALE, token_T, position_T, attend, cache, count=count
    )
    return log_probabilities(h_TD, target_T), cache


def in_pages(steps, table_NP) -> list[np.ndarray]:
    """Log-probabilities of both sequences, computed in steps: in each, how many tokens of which sequence, in that order."""
    cache = empty_cache(MODEL, NUM_PAGES)
    done, found = [0, 0], [[], []]
    for spans in steps:
        token_T, position_T, target_T = (np.zeros(NUM_STEP_TOKENS, np.int32) for _ in range(3))
        sequence_T, t = np.full(NUM_STEP_TOKENS, -1, np.int32), 0
        for n, num in spans:
            sequence, first = SEQUENCES[n], done[n]
            token_T[t : t + num], sequence_T[t : t + num] = sequence[first : first + num], n
            position_T[t : t + num] = np.arange(first, first + num)
            targets = sequence[first + 1 : first + num + 1]
            target_T[t : t + len(targets)] = targets
            t, done[n] = t + num, first + num
        logprob_T, cache = paged_step(
            cache, token_T, position_T, sequence_T, np.asarray(table_NP, np.int32), target_T, np.int32(t)
        )
        t = 0
        for n, num in spans:
            found[n].append(np.asarray(logprob_T)[t : t + num])
            t += num
    assert done == [len(s) for s in SEQUENCES]
    return [np.concatenate(parts)[:-1] for parts in found]


@functools.cache
def wanted_logprobs() -> list[np.ndarray]:
    found = []
    for token_T in SEQUENCES:
        logits_TV = reference_logits(MODEL, tiny_params(), token_T, adapter=tiny_adapter(), scale=ADAPTER_SCALE)
        found.append(log_softmax(logits_TV / TEMPERATURE)[np.arange(len(token_T) - 1), token_T[1:]])
    return found


ONE_CHUNK = [[(0, 39)], [(1, 24)]]
CHUNKS = [[(1, 4)], [(0, 16), (1, 16)], [(1, 1), (0, 23)], [(1, 3)]]
TOKEN_BY_TOKEN = [[(0, 1), (1, 1)]] * 24 + [[(0, 1)]] * 15
TABLE = [[0, 1, 2], [3, 4, 5]]
SCATTERED = [[11, 0, 7], [2, 9, 1]]


@pytest.mark.parametrize("steps", [ONE_CHUNK, CHUNKS, TOKEN_BY_TOKEN])
@pytest.mark.parametrize("table", [TABLE, SCATTERED])
def test_the_paged_forward_equals_the_float64_reference(steps, table):
    for got, wanted in zip(in_pages(steps, table), wanted_logprobs(), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=0)


def assert_same_bits(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


@pytest.fixture(scope="module")
def scored(kernels):
    """The row as the learner scores it, beside its gradient."""
    logprob_N, gradient = packed_row(tiny_adapter(), differentiable=True, with_gradient=True)
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))
    return in_row(logprob_N)


@pytest.mark.parametrize("differentiable", [False, True])
def test_a_gradient_beside_it_changes_no_bit(scored, differentiable):
    assert_same_bits(in_row(packed_row(tiny_adapter(), differentiable=differentiable)[0]), scored)


@pytest.mark.parametrize("steps", [ONE_CHUNK, CHUNKS, TOKEN_BY_TOKEN])
@pytest.mark.parametrize("table", [TABLE, SCATTERED])
def test_the_paged_forward_has_the_bits_of_the_packed_one(scored, steps, table):
    assert_same_bits(in_pages(steps, table), scored)


def test_the_packed_forward_equals_the_float64_reference():
    got_N = packed_row(tiny_adapter(), differentiable=True)[0]
    for got, wanted in zip(in_row(got_N), wanted_logprobs(), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=0)


@settings(max_examples=25)
@given(st.permutations(range(NUM_PAGES)), st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=12))
def test_any_chunks_in_any_pages_have_the_same_bits(scored, pages, wishes):
    left, steps = [len(s) for s in SEQUENCES], []
    for wish in [*wishes, (20, 20), (20, 20)]:
        spans = [(n, min(num, left[n])) for n, num in enumerate(wish)]
        left = [a - b for a, (_, b) in zip(left, spans, strict=True)]
        steps.append([span for span in spans if span[1]])
    assert_same_bits(in_pages([spans for spans in steps if spans], [pages[:3], pages[3:6]]), scored)


def test_a_step_writes_its_own_pages_only():
    """Tokens 14 to 17 of the sequence in pages 4, 1 and 5: two lanes at the end of page 4, two at the beginning of page 1.

    Padding may write to the last page.
    """
    before = jax.tree.map(lambda x: x + 7.0, empty_cache(MODEL, num_pages=6))
    after = jax.tree.map(jnp.copy, before)
    position_T = np.array([14, 15, 16, 17, 0, 0], np.int32)
    sequence_T = np.array([1, 1, 1, 1, -1, -1], np.int32)
    table_NP = np.array([[0, 2, 3], [4, 1, 5]], np.int32)
    zero_T = np.zeros(6, np.int32)
    _, after = paged_step(after, PROMPT[:6], position_T, sequence_T, table_NP, zero_T, np.int32(4))
    for old, new, lane_axis in ((before.keys, after.keys, 4), (before.values, after.values, 3)):
        changed = np.argwhere(np.asarray(old != new))
        changed = changed[changed[:, 1] < 6]
        assert set(map(tuple, changed[:, [1, lane_axis]])) == {(4, 14), (4, 15), (1, 0), (1, 1)}
        assert set(changed[:, 0]) == {0, 1}
