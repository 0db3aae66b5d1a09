"""The engine against a plain loop without a cache, and against itself: a request's bits depend on the request alone."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postrl.contracts import StopReason
from postrl.learner.batch import Episode, RowShape, pack
from postrl.learner.losses import Supervised
from postrl.learner.step import StepConfig, score_row
from postrl.rollout.engine import Engine, EngineConfig, PolicySampler, tree_digest
from tests.policy.tiny import ADAPTER_SCALE, MODEL, tiny_adapter, tiny_params
from tests.rollout.plain import CONFIG, NO_EOS, plain_sample, small_engine

PROMPT = np.array([5, 9, 33, 2, 60, 7, 7, 41, 12, 30, 8], np.int32)
TIMEOUT_S = 600
_sessions = itertools.count(1)


@pytest.fixture(scope="module")
def engine():
    with small_engine() as engine:
        yield engine


def sample_in(engine, prompt, *, session=None, seed=0, temperature=0.0, max_new_tokens=6, end=True):
    session = next(_sessions) if session is None else session
    future = engine.submit(
        np.asarray(prompt), seed=seed, session=session, temperature=temperature, max_new_tokens=max_new_tokens
    )
    completion = future.result(TIMEOUT_S)
    if end:
        engine.end(session)
    return completion


# ------------------------------------------------------------------------------------------------ against a plain loop


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:2]])
def test_equals_sampling_without_a_cache(engine, prompt, temperature):
    """Chunked prefill, cache and buckets (the smaller one is left at 20 tokens) give what the whole sequence gives."""
    completion = sample_in(engine, prompt, seed=3, temperature=temperature, max_new_tokens=14)
    tokens, logprobs = plain_sample(prompt, 14, temperature=temperature, seed=3)
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
    """Two turns at temperature 0.7: the learner's log-probabilities of the packed episode equal the engine's."""
    session = next(_sessions)
    first = sample_in(engine, PROMPT, session=session, temperature=0.7, seed=1, end=False)
    context = np.concatenate([PROMPT, first.token_T, [50, 51, 52]]).astype(np.int32)
    second = sample_in(engine, context, session=session, temperature=0.7, seed=2)
    num_prompt = len(PROMPT)
    token_T = np.concatenate([context, second.token_T])
    sampled_T = np.ones(len(token_T), bool)
    sampled_T[:num_prompt] = sampled_T[len(context) - 3 : len(context)] = False
    logprob_T = np.zeros(len(token_T), np.float32)
    logprob_T[sampled_T] = np.concatenate([first.logprob_T, second.logprob_T])
    batch = pack([[Episode(token_T, sampled_T, logprob_T, 1.0)]], [RowShape(40, 16)], max_rows=1)
    row = jax.tree.map(lambda x: jnp.asarray(x[0]), batch.rows)
    config = StepConfig(MODEL, ADAPTER_SCALE, 0.7, Supervised(), None)  # pyright: ignore[reportArgumentType]
    scored, _ = jax.jit(lambda row: score_row(config, tiny_params(), tiny_adapter(), row))(row)
    mask = np.asarray(row.mask_N)
    assert mask.sum() == 12
    np.testing.assert_allclose(np.asarray(scored)[mask], np.asarray(row.sampled_logprob_N)[mask], atol=1e-5, rtol=0)


def test_a_continued_session_equals_a_fresh_one(engine):
    session = next(_sessions)
    context = PROMPT
    for seed in range(3):
        before = engine.stats.num_prefilled_tokens
        continued = sample_in(engine, context, session=session, seed=seed, temperature=1.0, max_new_tokens=4, end=False)
        computed = engine.stats.num_prefilled_tokens - before
        if seed:  # only what the environment said and the last sampled token; the last observed one enters decoding
            assert computed == 3
        fresh = sample_in(engine, context, seed=seed, temperature=1.0, max_new_tokens=4)
        np.testing.assert_array_equal(continued.token_T, fresh.token_T)
        np.testing.assert_allclose(continued.logprob_T, fresh.logprob_T, atol=1e-5, rtol=0)
        context = np.concatenate([context, continued.token_T, [1 + seed, 2, 3]]).astype(np.int32)
    engine.end(session)


# ------------------------------------------------------------------------------------------- independence of the rest

requests = st.tuples(
    st.integers(0, 2),  # which shared beginning
    st.integers(1, 14),  # how much of it
    st.lists(st.integers(0, 63), min_size=1, max_size=9),  # what follows
    st.integers(0, 3),  # seed
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(1, 9),  # new tokens
)
BEGINNINGS = np.random.default_rng(5).integers(0, 64, (3, 14))
_alone: dict = {}


def prompt_of(request):
    beginning, length, own, *_ = request
    return np.concatenate([BEGINNINGS[beginning][:length], own]).astype(np.int32)


def alone(engine, request):
    """The completion of a request that meets no other and finds no prefix: after a publication all slots are empty."""
    key = (prompt_of(request).tobytes(), *request[3:])
    if key not in _alone:
        engine.publish(tiny_params(), tiny_adapter(), version=0)
        _, _, _, seed, temperature, num = request
        _alone[key] = sample_in(engine, prompt_of(request), seed=seed, temperature=temperature, max_new_tokens=num)
    return _alone[key]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=1, max_size=14))
def test_neighbours_slots_prefixes_and_buckets_change_no_bit(engine, mix):
    """Up to 14 requests at once on 10 slots: other rows, other slots, copied prefixes, larger buckets of both kinds."""
    wanted = [alone(engine, request) for request in mix]
    engine.publish(tiny_params(), tiny_adapter(), version=0)
    futures, ended = [], threading.Semaphore(0)

    def end(session):
        engine.end(session)
        ended.release()

    for request in mix:
        _, _, _, seed, temperature, num = request
        session = next(_sessions)
        future = engine.submit(
            prompt_of(request), seed=seed, session=session, temperature=temperature, max_new_tokens=num
        )
        future.add_done_callback(lambda _, session=session: end(session))
        futures.append(future)
    for future, completion in zip(futures, wanted, strict=True):
        got = future.result(TIMEOUT_S)
        np.testing.assert_array_equal(got.token_T, completion.token_T)
        np.testing.assert_array_equal(got.logprob_T, completion.logprob_T)
    for _ in mix:  # a future wakes its waiter before it calls back
        assert ended.acquire(timeout=TIMEOUT_S)


def test_a_shared_prompt_is_computed_once(engine):
    """Of four requests for one prompt the first computes its 10 leading tokens, the others copy them."""
    engine.publish(tiny_params(), tiny_adapter(), version=0)
    before = engine.stats
    futures = [
        engine.submit(PROMPT, seed=s, session=next(_sessions), temperature=1.0, max_new_tokens=3) for s in range(4)
    ]
    for future in futures:
        future.result(TIMEOUT_S)
    after = engine.stats
    assert after.num_prompt_tokens - before.num_prompt_tokens == 44
    assert after.num_prefilled_tokens - before.num_prefilled_tokens == 10
    for session in list(engine._slot_of):
        engine.end(session)


# --------------------------------------------------------------------------------------------------------- stopping


def test_stops_at_the_end_token_and_keeps_it(engine):
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
    """A prompt of 37 of 40 tokens has room for three, and they are the right ones."""
    prompt = np.random.default_rng(0).integers(0, 64, 37)
    completion = sample_in(engine, prompt, max_new_tokens=50)
    assert completion.stop is StopReason.LENGTH
    assert completion.token_T.tolist() == plain_sample(prompt, 3)[0].tolist()
    last = sample_in(engine, np.concatenate([prompt, [1, 2]]), max_new_tokens=50)
    assert len(last.token_T) == 1


@pytest.mark.parametrize("length", [0, 1, 40, 41])
def test_prompts_that_cannot_be_served_are_refused(engine, length):
    with pytest.raises(ValueError, match=f"prompt of {length} tokens; it must have at least 2 and fewer than 40"):
        engine.submit(np.ones(length, np.int32), seed=0, session=0, temperature=0.0, max_new_tokens=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_buckets": (8,)}, "largest buckets 8 x 40 must cover 10 slots x 40 tokens"),
        ({"context_buckets": (20, 39)}, "largest buckets 16 x 39 must cover 10 slots x 40 tokens"),
        ({"row_buckets": (4, 16)}, "fewer than 8 rows change a row's bits"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{**vars(CONFIG), **change})


def test_buckets_may_be_larger_than_the_context():
    """A run that only lowers `max_context` keeps the default buckets."""
    config = EngineConfig(
        num_slots=10, max_context=40, prefill_buckets=(2, 4), row_buckets=(8, 16), context_buckets=(20, 64)
    )
    with small_engine(config=config) as engine:
        completion = sample_in(engine, PROMPT, max_new_tokens=12)
    assert completion.token_T.tolist() == plain_sample(PROMPT, 12)[0].tolist()


# -------------------------------------------------------------------------------------------------------- publishing


def test_a_publication_takes_effect_and_forgets_prefixes():
    with small_engine() as engine:
        sample_in(engine, PROMPT)
        newer = jax.tree.map(jnp.copy, tiny_adapter(1))
        digest = engine.publish(tiny_params(), newer, version=5)
        assert digest == tree_digest(tiny_adapter(1)) != tree_digest(tiny_adapter(0))
        for leaf in jax.tree.leaves(newer):
            leaf.delete()  # as the learner's donation does
        before = engine.stats.num_prefilled_tokens
        completion = sample_in(engine, PROMPT)
        assert engine.stats.num_prefilled_tokens - before == 10
        tokens, logprobs = plain_sample(PROMPT, 6, adapter_seed=1)
        assert completion.token_T.tolist() == tokens.tolist() != plain_sample(PROMPT, 6)[0].tolist()
        np.testing.assert_allclose(completion.logprob_T, logprobs, atol=1e-5, rtol=0)
        assert set(completion.version_T) == {5}


def test_a_publication_of_a_fully_trained_policy_takes_effect():
    with small_engine() as engine:
        sample_in(engine, PROMPT)
        trained = jax.tree.map(lambda x: x * 1.1, tiny_params())
        wanted = tree_digest(trained)
        assert engine.publish(trained, None, version=1) == wanted
        for leaf in jax.tree.leaves(trained):
            leaf.delete()
        got = sample_in(engine, PROMPT)
    trained = jax.tree.map(lambda x: x * 1.1, tiny_params())
    with Engine(MODEL, trained, None, 0.0, NO_EOS, CONFIG) as fresh:
        wanted = sample_in(fresh, PROMPT)
    with Engine(MODEL, tiny_params(), None, 0.0, NO_EOS, CONFIG) as stale:
        assert np.abs(got.logprob_T[0] - sample_in(stale, PROMPT).logprob_T[0]) > 1e-3
    np.testing.assert_array_equal(got.token_T, wanted.token_T)
    np.testing.assert_array_equal(got.logprob_T, wanted.logprob_T)


@pytest.mark.parametrize("trains_adapter", [True, False])
def test_a_publication_that_missed_the_copy_for_decoding_shows(monkeypatch, trains_adapter):
    with small_engine() as engine:
        monkeypatch.setattr("postrl.rollout.engine._for_decoding", lambda *_, stale=engine._decoding: stale)
        if trains_adapter:
            digest = engine.publish(tiny_params(), tiny_adapter(1), version=1)
        else:
            digest = engine.publish(jax.tree.map(lambda x: x * 1.1, tiny_params()), None, version=1)
        assert digest.startswith("prefill and decoding differ: ")


def test_a_publication_needs_all_sessions_closed(engine):
    session = next(_sessions)
    assert set(sample_in(engine, PROMPT, session=session, end=False).version_T) == {0}
    with pytest.raises(AssertionError, match="publication with 1 open sessions"):
        engine.publish(tiny_params(), tiny_adapter(), version=1)
    engine.end(session)
    engine.publish(tiny_params(), tiny_adapter(), version=0)


def test_the_sampler_passes_its_settings_on(engine):
    sampler = PolicySampler(engine, temperature=0.7, max_new_tokens=5)
    session = next(_sessions)
    got = sampler.sample(PROMPT, seed=4, session=session)
    assert session in engine._slot_of
    sampler.end(session)
    assert session not in engine._slot_of
    wanted = sample_in(engine, PROMPT, seed=4, temperature=0.7, max_new_tokens=5)
    np.testing.assert_array_equal(got.token_T, wanted.token_T)
    np.testing.assert_array_equal(got.logprob_T, wanted.logprob_T)


def test_ending_an_unknown_session_is_nothing(engine):
    engine.end(-17)


# ------------------------------------------------------------------------------------------------------------ digests


def test_digests_tell_policies_apart():
    tree = {"a": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
    digest = tree_digest(tree)
    assert digest == tree_digest({name: jnp.asarray(x) for name, x in tree.items()})
    other = {**tree, "a": tree["a"].copy()}
    other["a"][1, 2] = np.nextafter(np.float32(0), np.float32(1))
    variants = [
        other,
        {**tree, "a": tree["a"].reshape(3, 2)},
        {**tree, "a": tree["a"].astype(np.int32)},
        {"a": tree["a"], "c": tree["b"]},
        {"a": tree["a"]},
        {**tree, "a": -tree["a"]},  # -0.0 has other bits
    ]
    assert len({digest, *map(tree_digest, variants)}) == 1 + len(variants)
