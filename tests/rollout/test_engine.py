"""The engine against a plain loop without a cache, and against the learner: what is cached changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from postrl.contracts import StopReason
from postrl.learner.batch import Episode, RowShape, pack
from postrl.learner.losses import Supervised
from postrl.learner.step import StepConfig, score_row
from postrl.rollout.engine import PolicySampler
from tests.policy.tiny import ADAPTER_SCALE, MODEL, tiny_adapter, tiny_params
from tests.rollout.plain import TIMEOUT_S, assert_same, assert_same_bits, plain_sample, sample_in, small_engine

PROMPT = np.array([5, 9, 33, 2, 60, 7, 7, 41, 12, 30, 8], np.int32)
LONG_PROMPT = np.random.default_rng(1).integers(0, 64, 40).astype(np.int32)
PAGE = 16


@pytest.fixture(scope="module")
def engine():
    with small_engine() as engine:
        yield engine


def forget(engine):
    """A publication of the policy that the engine has: nothing is in the cache."""
    engine.publish(tiny_params(), tiny_adapter(), version=0)


# ------------------------------------------------------------------------------------------------ against a plain loop


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prompt", [LONG_PROMPT, PROMPT, PROMPT[:1]])
def test_equals_sampling_without_a_cache(engine, prompt, temperature):
    """A prompt in two chunks, one in part of a page, and the shortest; pages fill up on the way."""
    forget(engine)
    completion = sample_in(engine, prompt, seed=3, temperature=temperature, max_new_tokens=24)
    tokens, logprobs = plain_sample(prompt, 24, temperature=temperature, seed=3)
    np.testing.assert_array_equal(completion.token_T, tokens)
    np.testing.assert_allclose(completion.logprob_T, logprobs, atol=1e-5, rtol=0)
    assert (completion.token_T.dtype, completion.logprob_T.dtype, completion.version_T.dtype) == (
        "int32",
        "float32",
        "int32",
    )


def test_the_seed_alone_decides(engine):
    same = [sample_in(engine, PROMPT, seed=s, temperature=1.0, max_new_tokens=12).token_T.tolist() for s in (1, 1, 2)]
    assert same[0] == same[1] != same[2]


def test_the_learner_scores_what_was_sampled(engine):
    """Three episodes of two turns at temperature 0.7: the learner's log-probabilities of the packed group are the engine's."""
    forget(engine)
    episodes = []
    for member in range(3):
        first = sample_in(engine, LONG_PROMPT[:20], temperature=0.7, seed=member, max_new_tokens=9 + member)
        context = np.concatenate([LONG_PROMPT[:20], first.token_T, [50, 51, member]]).astype(np.int32)
        second = sample_in(engine, context, temperature=0.7, seed=9 + member, max_new_tokens=12)
        token_T = np.concatenate([context, second.token_T])
        sampled_T = np.ones(len(token_T), bool)
        sampled_T[:20] = sampled_T[len(context) - 3 : len(context)] = False
        logprob_T = np.zeros(len(token_T), np.float32)
        logprob_T[sampled_T] = np.concatenate([first.logprob_T, second.logprob_T])
        episodes.append(Episode(token_T, sampled_T, logprob_T, 1.0))
    batch = pack([episodes], [RowShape(128, 80)], max_rows=1)
    row = jax.tree.map(lambda x: jnp.asarray(x[0]), batch.rows)
    config = StepConfig(MODEL, ADAPTER_SCALE, 0.7, Supervised(), None)  # pyright: ignore[reportArgumentType]
    scored, _ = jax.jit(lambda row: score_row(config, tiny_params(), tiny_adapter(), row))(row)
    mask = np.asarray(row.mask_N)
    assert mask.sum() == 9 + 10 + 11 + 3 * 12
    assert_same_bits(np.asarray(scored)[mask], np.asarray(row.sampled_logprob_N)[mask])


# ------------------------------------------------------------------------------------------------------ what is cached


def test_a_continued_conversation_equals_a_fresh_one(engine):
    """Each turn computes what is not in full pages, and is what it would be without any."""
    context, turns, num_cached = LONG_PROMPT[:30], [], 0
    forget(engine)
    for seed in range(3):
        before = engine.stats
        turns.append((context, sample_in(engine, context, seed=seed, temperature=1.0, max_new_tokens=9)))
        assert engine.stats.num_prompt_tokens - before.num_prompt_tokens == len(context)
        assert engine.stats.num_prefilled_tokens - before.num_prefilled_tokens == len(context) - num_cached
        # The last sampled token was not computed.
        num_cached = (len(context) + 9 - 1) // PAGE * PAGE
        context = np.concatenate([context, turns[-1][1].token_T, [1 + seed, 2, 3]]).astype(np.int32)
    assert num_cached == 48  # 30 -> 0, 42 -> 32, 54 -> 48
    for seed, (context, continued) in enumerate(turns):
        forget(engine)
        before = engine.stats.num_prefilled_tokens
        assert_same(continued, sample_in(engine, context, seed=seed, temperature=1.0, max_new_tokens=9))
        assert engine.stats.num_prefilled_tokens - before == len(context)


@pytest.mark.parametrize(
    ("length", "num_own"),
    [(40, 8), (33, 1), (32, 16), (17, 1), (16, 16), (15, 15)],  # beyond full pages; of the last token's page nothing
)
def test_a_shared_prompt_is_computed_once(engine, length, num_own):
    """Of four requests for one prompt the first computes it, the others what is not in full pages: at most one page."""
    forget(engine)
    before = engine.stats
    with engine._wake:  # all are there when the engine looks
        futures = [engine.submit(LONG_PROMPT[:length], seed=s, temperature=1.0, max_new_tokens=3 + s) for s in range(4)]
    group = [future.result(TIMEOUT_S) for future in futures]
    assert engine.stats.num_prompt_tokens - before.num_prompt_tokens == 4 * length
    assert engine.stats.num_prefilled_tokens - before.num_prefilled_tokens == length + 3 * num_own
    assert num_own <= PAGE
    forget(engine)
    for s, completion in enumerate(group):
        assert_same(completion, sample_in(engine, LONG_PROMPT[:length], seed=s, temperature=1.0, max_new_tokens=3 + s))


# --------------------------------------------------------------------------------------------------------- stopping


def test_stops_at_the_end_token_and_keeps_it():
    tokens, _ = plain_sample(PROMPT, 8)
    eos_id = int(tokens[4])
    first = tokens.tolist().index(eos_id)
    with small_engine(eos_id=eos_id) as stopping:
        completion = sample_in(stopping, PROMPT, max_new_tokens=8)
        assert completion.token_T.tolist() == tokens[: first + 1].tolist()
        assert completion.stop is StopReason.STOP
        if first:
            cut = sample_in(stopping, PROMPT, max_new_tokens=first)
            assert cut.token_T.tolist() == tokens[:first].tolist()
            assert cut.stop is StopReason.LENGTH
        exact = sample_in(stopping, PROMPT, max_new_tokens=first + 1)
        assert exact.stop is StopReason.STOP  # the end token is the last that was allowed


def test_stops_after_max_new_tokens(engine):
    completion = sample_in(engine, PROMPT, max_new_tokens=1)
    assert (len(completion.token_T), len(completion.logprob_T), completion.stop) == (1, 1, StopReason.LENGTH)


def test_stops_where_the_context_is_full(engine):
    """A prompt of 77 of 80 tokens has room for three, and they are the right ones."""
    prompt = np.random.default_rng(0).integers(0, 64, 77)
    completion = sample_in(engine, prompt, max_new_tokens=50)
    assert completion.stop is StopReason.LENGTH
    assert completion.token_T.tolist() == plain_sample(prompt, 3)[0].tolist()
    last = sample_in(engine, np.concatenate([prompt, [1, 2]]), max_new_tokens=50)
    assert len(last.token_T) == 1


@pytest.mark.parametrize("length", [0, 80, 81])
def test_prompts_that_cannot_be_served_are_refused(engine, length):
    with pytest.raises(ValueError, match=f"prompt of {length} tokens; it must have at least 1 and fewer than 80"):
        engine.submit(np.ones(length, np.int32), seed=0, temperature=0.0, max_new_tokens=1)


@pytest.mark.parametrize("token", [-1, 64])
def test_ids_outside_the_vocabulary_are_refused(engine, token):
    with pytest.raises(ValueError, match=f"ids from {min(3, token)} to {max(3, token)}; the vocabulary has 64"):
        engine.submit(np.array([3, token], np.int32), seed=0, temperature=0.0, max_new_tokens=1)


@pytest.mark.parametrize(
    "change", [{"max_new_tokens": 0}, {"seed": -1}, {"seed": 2**31}, {"temperature": -0.1}, {"temperature": np.nan}]
)
def test_impossible_settings_are_refused(engine, change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"{name} {value}"):
        engine.submit(PROMPT, **{"seed": 0, "temperature": 1.0, "max_new_tokens": 1, **change})


def test_the_sampler_passes_its_settings_on(engine):
    got = PolicySampler(engine, temperature=0.7, max_new_tokens=5).sample(PROMPT, seed=4)
    assert len(got.token_T) == 5
    assert_same(got, sample_in(engine, PROMPT, seed=4, temperature=0.7, max_new_tokens=5))
    greedy = PolicySampler(engine, temperature=0.0, max_new_tokens=5).sample(PROMPT, seed=4)
    assert greedy.token_T.tolist() == plain_sample(PROMPT, 5)[0].tolist() != got.token_T.tolist()
