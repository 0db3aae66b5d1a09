"""Each operation's kernel against its plain form, the bits of a row in any company, gradients, and what is sampled.

Shapes: as in postrl/policy/ops.py; most are no multiples of 16, the width of the kernels' vectors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.policy import ops

THETA = 100.0
TOKENS = (1, 7, 33)
HEADS = ((2, 2, 8), (1, 3, 24), (3, 3, 64), (1, 2, 80))
"""kv heads, query heads a kv head, head dim."""
ONE = jnp.int32(1)
"""The layer, of two or three."""


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(0, scale, shape), jnp.float32)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


def assert_close(got, wanted, atol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)


# ---------------------------------------------------------------------------------- operations on rows: each with a call

WEIGHTS = {"w": normal(3, 13, 40, scale=0.2), "a": normal(3, 5, 40, scale=0.2), "b": normal(3, 13, 5, seed=1)}
ROW_OPS = {
    "linear": (ops.linear, lambda x, count: (x, WEIGHTS["w"], ONE, count)),
    "wide linear": (ops.linear, lambda x, count: (x, normal(2, 150, 40, scale=0.2), ONE, count)),
    "add_low_rank": (
        functools.partial(ops.add_low_rank, scale=0.7),
        lambda x, count: (x[:, 20:33], x, WEIGHTS["a"], WEIGHTS["b"], ONE, count),
    ),
    "rms_norm": (
        functools.partial(ops.rms_norm, eps=1e-5),
        lambda x, count: (x, 1 + normal(3, 40, scale=0.1), ONE, count),
    ),
    "swiglu": (ops.swiglu, lambda x, count: (4 * x[:, :19], x[:, 19:38], count)),
}


def both(name: str):
    """The operation as it runs, and its plain form."""
    op, _ = ROW_OPS[name]
    if isinstance(op, functools.partial):
        return op, functools.partial(op.func.__wrapped__, **op.keywords)
    return op, op.__wrapped__


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("T", [*TOKENS, 200])
@pytest.mark.parametrize("name", ROW_OPS)
def test_rows_equal_the_plain_form(name, T):
    op, plain = both(name)
    operands = ROW_OPS[name][1](normal(T, 40), jnp.int32(T))
    assert_close(jax.jit(op)(*operands), plain(*operands))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("count", [0, 1, 5, 7, 9])
@pytest.mark.parametrize("name", ROW_OPS)
def test_padding_rows_are_zero(name, count):
    """Whatever they hold; a count above the number of rows is that number."""
    op, plain = both(name)
    operands = ROW_OPS[name][1](normal(7, 40).at[count:].set(jnp.nan), jnp.int32(count))
    got = op(*operands)
    assert not np.any(got[count:])
    assert_close(got[:count], plain(*operands)[:count])


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_of_a_stack(layer):
    x = normal(7, 40)
    got = jax.jit(ops.linear)(x, WEIGHTS["w"], jnp.int32(layer), jnp.int32(7))
    assert_close(got, x @ WEIGHTS["w"][layer].T)
    a, b = WEIGHTS["a"][layer], WEIGHTS["b"][layer]
    got = ops.add_low_rank(x[:, :13], x, WEIGHTS["a"], WEIGHTS["b"], jnp.int32(layer), jnp.int32(7), scale=0.5)
    assert_close(got, x[:, :13] + 0.5 * (x @ a.T) @ b.T)
    weight = normal(3, 40)
    got = ops.rms_norm(x, weight, jnp.int32(layer), jnp.int32(7), eps=0.0)
    assert_close(got, x / np.sqrt(np.mean(np.square(x), axis=1, keepdims=True)) * weight[layer])


@pytest.mark.usefixtures("kernels")
@settings(max_examples=25)
@given(name=st.sampled_from(sorted(ROW_OPS)), rows=st.lists(st.integers(0, 199), min_size=1, max_size=40))
def test_a_row_has_the_same_bits_in_any_batch(name, rows):
    """Rows out of 200 (more than a thread's block, and enough work for several threads), repeated, in any order, or alone."""
    got = ROW_OPS[name][0](*ROW_OPS[name][1](normal(200, 40)[np.array(rows)], jnp.int32(len(rows))))
    np.testing.assert_array_equal(bits(got), all_rows(name)[rows])


@functools.cache
def all_rows(name: str) -> np.ndarray:
    return bits(ROW_OPS[name][0](*ROW_OPS[name][1](normal(200, 40), jnp.int32(200))))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ROW_OPS)
def test_a_row_has_the_same_bits_whatever_is_padding(name):
    op, call = ROW_OPS[name]
    for count in (1, 2, 3, 95, 97, 199):
        got = op(*call(normal(200, 40), jnp.int32(count)))
        np.testing.assert_array_equal(bits(got)[:count], all_rows(name)[:count])


@pytest.mark.usefixtures("kernels")
def test_swiglu_of_any_size():
    """Below -88 it is next to 0, though e^-g has no float32 there; far above 0 it is the gate itself."""
    gate = jnp.array(
        [[-np.inf, -1e30, -200, -130, -100, -90, -89, -88, -20, -1, -0.0, 0, 1, 20, 88, 89, 100, 200, 1e30]]
    )
    gate = gate.at[0, 0].set(jnp.finfo(jnp.float32).min)
    got = ops.swiglu(gate, jnp.full_like(gate, 2), jnp.int32(1))
    exact = np.asarray(gate, np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(got, 2 * exact / (1 + np.exp(-exact)), rtol=1e-6, atol=1e-30)


# ------------------------------------------------------------------------------------------------- softmax and sampling

VOCABS = (1, 5, 16, 127, 128, 129, 300, 513)


def inverse(N: int) -> jax.Array:
    return jnp.asarray(np.resize([1.0, 1.25, 0.5, 3.0], N), jnp.float32)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("V", VOCABS)
def test_log_probability_equals_float64(V):
    logits_NV, target_N = normal(7, V, scale=6), jnp.asarray(np.arange(7) * 37 % V, jnp.int32)
    got = jax.jit(ops.log_probability)(logits_NV, inverse(7), target_N)
    scaled = np.asarray(logits_NV, np.float64) * np.asarray(inverse(7), np.float64)[:, None]
    logz_N = np.log(np.exp(scaled - scaled.max(1, keepdims=True)).sum(1)) + scaled.max(1)
    np.testing.assert_allclose(got[1], logz_N, atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(got[0], scaled[np.arange(7), target_N] - logz_N, atol=1e-5, rtol=1e-6)
    assert_close(got, ops.log_probability.__wrapped__(logits_NV, inverse(7), target_N))


@pytest.mark.usefixtures("kernels")
@settings(max_examples=20)
@given(rows=st.lists(st.integers(0, 49), min_size=1, max_size=20), V=st.sampled_from([13, 300]))
def test_a_log_probability_has_the_same_bits_in_any_batch(rows, V):
    logits_NV, target_N = normal(50, V, scale=3), jnp.asarray(np.arange(50) * 7 % V, jnp.int32)
    at = np.array(rows)
    every = ops.log_probability(logits_NV, inverse(50), target_N)
    got = ops.log_probability(logits_NV[at], inverse(50)[at], target_N[at])
    for a, b in zip(got, every, strict=True):
        np.testing.assert_array_equal(bits(a), bits(b)[at])


@pytest.mark.usefixtures("kernels")
@settings(max_examples=30)
@given(
    V=st.sampled_from(VOCABS), N=st.sampled_from(TOKENS), seed=st.integers(0, 99), scale=st.sampled_from([0.1, 3, 30])
)
def test_a_sampled_token_has_the_bits_that_training_gives_it(V, N, seed, scale):
    logits_NV = normal(N, V, seed=seed, scale=scale)
    uniform_N = np.random.default_rng(seed).uniform(-0.3, 1, N).astype(np.float32)
    token_N, logprob_N = ops.sample(logits_NV, inverse(N), uniform_N, jnp.int32(N))
    at = np.random.default_rng(seed).permutation(N)
    alone_N, _ = ops.log_probability(logits_NV[at], inverse(N)[at], token_N[at])
    np.testing.assert_array_equal(bits(logprob_N)[at], bits(alone_N))


def sampled(form: str, *operands):
    return (jax.jit(ops.sample) if form == "kernel" else ops.sample.__wrapped__)(*operands)


@pytest.fixture(params=["kernel", "plain"])
def form(request):
    if request.param == "kernel":
        request.getfixturevalue("kernels")
    return request.param


@pytest.mark.parametrize("V", VOCABS)
def test_greedy_is_argmax(form, V):
    """Few different logits, so that the largest occurs often: its first place."""
    logits_NV = np.random.default_rng(V).integers(-3, 3, (33, V)).astype(np.float32)
    token_N, _ = sampled(form, logits_NV, inverse(33), jnp.full(33, -1.0), jnp.int32(33))
    np.testing.assert_array_equal(token_N, np.argmax(logits_NV, axis=-1))
    assert token_N.dtype == jnp.int32


@pytest.mark.parametrize("V", VOCABS)
def test_the_interval_of_the_token_holds_the_number(form, V):
    N = 500
    logits_NV, uniform_N = normal(N, V, scale=2), np.random.default_rng(V).random(N).astype(np.float32)
    token_N, _ = sampled(form, logits_NV, inverse(N), uniform_N, jnp.int32(N))
    weight_NV = np.exp(np.asarray(logits_NV, np.float64) * np.asarray(inverse(N), np.float64)[:, None])
    cumulative_NV = np.cumsum(weight_NV, axis=1) / weight_NV.sum(1, keepdims=True)
    wanted_N = (cumulative_NV <= uniform_N[:, None]).sum(1)
    inside_N = np.abs(cumulative_NV - uniform_N[:, None]).min(1) > 1e-5  # nearer than that float32 decides
    assert inside_N.mean() > 0.9
    np.testing.assert_array_equal(np.asarray(token_N)[inside_N], wanted_N[inside_N])


@pytest.mark.parametrize("nothing", [-np.inf, -1e30, -300.0])
@pytest.mark.parametrize("V", VOCABS[1:])
def test_probability_zero_is_never_sampled(form, V, nothing):
    """Whole blocks of nothing, and the ends of the unit interval."""
    uniform_N = np.array([0, 2**-24, 0.3, 0.5, 1 - 2**-23, 1 - 2**-24, -1] * 3, np.float32)
    logits_NV = np.array(normal(len(uniform_N), V))
    has_weight_NV = np.random.default_rng(V).random(logits_NV.shape) < 0.4
    has_weight_NV[:, : V // 3] = False
    has_weight_NV[:7, -1] = False
    has_weight_NV[:, V // 2] = True
    logits_NV[~has_weight_NV] = nothing
    token_N, logprob_N = sampled(form, logits_NV, inverse(len(uniform_N)), uniform_N, jnp.int32(len(uniform_N)))
    assert has_weight_NV[np.arange(len(uniform_N)), token_N].all()
    assert np.isfinite(logprob_N).all()


@pytest.mark.usefixtures("kernels")
def test_rows_that_are_padding_sample_nothing():
    logits_NV = normal(5, 20).at[3:].set(jnp.nan)
    token_N, logprob_N = ops.sample(logits_NV, inverse(5), jnp.full(5, 0.5), jnp.int32(3))
    assert token_N[3:].tolist() == logprob_N[3:].tolist() == [0, 0]
    assert np.all(logprob_N[:3] < 0)


# -------------------------------------------------------------------------------------------------------------- attention


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("head_dim", [2, 8, 24, 64])
def test_rope_angles_equal_float64(head_dim):
    position_T = np.array([0, 1, 2, 15, 16, 1000], np.int32)
    got = jax.jit(functools.partial(ops.rope_angles, theta=1e4, head_dim=head_dim))(position_T)
    angle_TK = position_T[:, None] * 1e4 ** (-2 * np.arange(head_dim // 2) / head_dim)
    assert_close(got, (np.cos(angle_TK).astype(np.float32), np.sin(angle_TK).astype(np.float32)), atol=1e-7)
    assert_close(got, ops.rope_angles.__wrapped__(position_T, theta=1e4, head_dim=head_dim), atol=1e-3)


def qkv(T: int, heads: tuple[int, int, int], seed: int = 0):
    G, M, K = heads
    return normal(T, G, M, K, seed=seed), normal(T, G, K, seed=seed + 1), normal(T, G, K, seed=seed + 2)


def angles(position_T, head_dim: int):
    return ops.rope_angles(jnp.asarray(position_T, jnp.int32), theta=THETA, head_dim=head_dim)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", [(1, 0, 0), (3, 2, 2), (33, 0, 5), (20, 70, 9)])
def test_packed_attention_equals_the_plain_form(heads, lengths):
    """A prompt, two episodes behind it, a segment of its own, padding."""
    prompt, first, second = lengths
    counts = (prompt, first, second, 6, 4)
    segment_T, parent_T = (np.repeat(x, counts).astype(np.int32) for x in ([1, 2, 3, 4, 0], [-1, 1, 1, -1, -1]))
    position_T = np.concatenate([np.arange(prompt + first), prompt + np.arange(second), np.arange(6), np.zeros(4)])
    operands = (*qkv(len(segment_T), heads), *angles(position_T, heads[2]), segment_T, parent_T)
    got = jax.jit(ops.packed_attention)(*operands)
    assert_close(got[:-4], ops.packed_attention.__wrapped__(*operands)[:-4])
    assert not np.any(got[-4:])


def empty_pages(num: int, heads: tuple[int, int, int], fill: float):
    G, _, K = heads
    width = -(-K // 16) * 16
    return jnp.full((3, num + 1, G, K, 16), fill), jnp.full((3, num + 1, G, 16, width), fill)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads", HEADS)
def test_paged_attention_equals_the_plain_form(heads):
    """Three sequences at different places, two rows of padding; the caches after it too, but for the page of padding."""
    table_NP = np.array([[4, 0], [1, 5], [2, 3]], np.int32)
    keys, values = empty_pages(6, heads, 0.0)
    keys, values = keys + normal(*keys.shape), values.at[..., : heads[2]].add(normal(*values.shape)[..., : heads[2]])
    sequence_T = np.repeat([1, -1, 0, 2, -1], (13, 1, 1, 9, 1)).astype(np.int32)
    position_T = np.concatenate([np.arange(13), [0], [30], np.arange(10, 19), [0]]).astype(np.int32)
    operands = (*qkv(25, heads), *angles(position_T, heads[2]), sequence_T, position_T, table_NP, keys, values, ONE)
    got_o, *got = jax.jit(ops.paged_attention)(*operands)
    wanted_o, *wanted = ops.paged_attention.__wrapped__(*operands)
    real = sequence_T >= 0
    assert_close(got_o[real], wanted_o[real])
    assert not np.any(got_o[~real])
    assert_close([x[:, :6] for x in got], [x[:, :6] for x in wanted])
    for before, after in zip((keys, values), got, strict=True):  # the other layers
        np.testing.assert_array_equal(bits(before)[[0, 2]], bits(after)[[0, 2]])


NUM_STEP_TOKENS, PAGES_EACH = 128, 8


@functools.partial(jax.jit, static_argnames="heads")
def in_row(q, k, v, position_T, segment_T, parent_T, *, heads):
    return ops.packed_attention(q, k, v, *angles(position_T, heads[2]), segment_T, parent_T)


@functools.partial(jax.jit, static_argnames="heads", donate_argnums=(6, 7))
def in_pages(q, k, v, sequence_T, position_T, table_NP, keys, values, *, heads):
    cosine_sine = angles(position_T, heads[2])
    return ops.paged_attention(q, k, v, *cosine_sine, sequence_T, position_T, table_NP, keys, values, ONE)


@pytest.mark.usefixtures("kernels")
@settings(max_examples=25)
@given(
    heads=st.sampled_from(HEADS),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 30), st.integers(1, 70)),
    pages=st.permutations(range(3 * PAGES_EACH)),
    chunks=st.lists(st.tuples(*[st.integers(0, 40)] * 3), max_size=8),
    one_by_one=st.booleans(),
)
def test_attention_has_the_same_bits_packed_and_paged(heads, lengths, pages, chunks, one_by_one):
    """A prompt with two episodes and a third sequence: in one row, and in pages by any chunks, beside each other.

    The pages hold NaN at first: what an earlier request left there changes nothing.
    """
    prompt, first, second, other = lengths
    T, row = sum(lengths), 256
    counts = (*lengths, row - T)
    segment_T = np.repeat([1, 2, 3, 4, 0], counts).astype(np.int32)
    parent_T = np.repeat([-1, 1, 1, -1, -1], counts).astype(np.int32)
    position_T = np.concatenate([np.arange(prompt + first), prompt + np.arange(second), np.arange(other)])
    position_T = np.pad(position_T, (0, row - T)).astype(np.int32)
    q, k, v = (np.asarray(x) for x in qkv(row, heads))
    wanted = bits(in_row(q, k, v, position_T, segment_T, parent_T, heads=heads))

    sources = [  # where in the row the tokens of each sequence lie
        np.arange(prompt + first),
        np.concatenate([np.arange(prompt), prompt + first + np.arange(second)]),
        prompt + first + second + np.arange(other),
    ]
    done = [0, 0, 0]
    keys, values = empty_pages(3 * PAGES_EACH, heads, np.nan)
    table_NP = np.array(pages, np.int32).reshape(3, PAGES_EACH)
    rest = [(1, 1, 1)] * 110 if one_by_one else [(40, 40, 40)] * 3
    for wish in [*chunks, *rest]:
        source, sequence = [], []
        for n, num in enumerate(wish):
            part = sources[n][done[n] : done[n] + num]
            done[n] += len(part)
            source, sequence = [*source, *part], [*sequence, *[n] * len(part)]
        if not source:
            continue
        padding = (0, NUM_STEP_TOKENS - len(source))
        at, sequence_T = np.pad(source, padding), np.pad(sequence, padding, constant_values=-1).astype(np.int32)
        out, keys, values = in_pages(
            q[at], k[at], v[at], sequence_T, position_T[at], table_NP, keys, values, heads=heads
        )
        np.testing.assert_array_equal(bits(out)[: len(source)], wanted[source])
    assert done == [len(s) for s in sources]


# -------------------------------------------------------------------------------------------------------------- gradients


def assert_same_gradient(op, plain, operands, argnums):
    def gradient(function):
        def total(*operands):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(*operands)))

        return jax.jit(jax.grad(total, argnums))(*operands)

    got, wanted = gradient(op), gradient(plain)
    assert all(np.any(np.asarray(leaf)) for leaf in wanted)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1, np.abs(b).max()), rtol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("name", "argnums"),
    [("linear", (0, 1)), ("add_low_rank", (0, 1, 2, 3)), ("rms_norm", (0, 1)), ("swiglu", (0, 1))],
)
def test_gradients_of_rows(name, argnums):
    assert_same_gradient(*both(name), ROW_OPS[name][1](normal(33, 40), jnp.int32(33)), argnums)


@pytest.mark.usefixtures("kernels")
def test_gradient_of_log_probability():
    operands = (normal(7, 129, scale=2), inverse(7), jnp.asarray(np.arange(7) * 11, jnp.int32))
    assert_same_gradient(ops.log_probability, ops.log_probability.__wrapped__, operands, (0, 1))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("heads", HEADS)
def test_gradient_of_packed_attention(heads):
    segment_T = np.repeat([1, 2, 3], (5, 8, 3)).astype(np.int32)
    position_T = np.concatenate([np.arange(13), 5 + np.arange(3)])
    parent_T = np.repeat([-1, 1, 1], (5, 8, 3)).astype(np.int32)
    operands = (*qkv(16, heads), *angles(position_T, heads[2]), segment_T, parent_T)
    assert_same_gradient(ops.packed_attention, ops.packed_attention.__wrapped__, operands, (0, 1, 2, 3, 4))


def test_gradient_of_the_low_rank_map():
    """Its derivative is written out: against automatic differentiation of the same two products."""
    operands = normal(33, 40), normal(5, 40), normal(13, 5)
    assert_same_gradient(ops.low_rank_map, lambda x, a, b: (x @ a.T) @ b.T, operands, (0, 1, 2))
