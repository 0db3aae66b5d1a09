"""What a request gets depends on the request alone: not on its neighbours, its pages, or how often it gave them back."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postrl.rollout.engine import EngineConfig
from postrl.rollout.step import engine_step
from tests.policy.tiny import tiny_adapter, tiny_params
from tests.rollout.plain import TIMEOUT_S, Gate, assert_same, sample_in, small_engine, until

TIGHT = EngineConfig(max_requests=4, max_context=80, num_pages=9, max_step_tokens=12)
"""Four requests of up to five pages on nine: they take them from each other."""


@pytest.fixture(scope="module")
def engine():
    with small_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def tight():
    with small_engine(config=TIGHT) as engine:
        yield engine


requests = st.tuples(
    st.integers(0, 2),  # which shared beginning
    st.integers(1, 40),  # how much of it
    st.lists(st.integers(0, 63), min_size=1, max_size=9),  # what follows
    st.integers(0, 3),  # seed
    st.sampled_from([0.0, 0.7, 1.0]),
    st.integers(1, 24),  # new tokens
)
BEGINNINGS = np.random.default_rng(5).integers(0, 64, (3, 40))
_alone: dict = {}


def prompt_of(request):
    beginning, length, own, *_ = request
    return np.concatenate([BEGINNINGS[beginning][:length], own]).astype(np.int32)


def submit(engine, request):
    _, _, _, seed, temperature, num = request
    return engine.submit(prompt_of(request), seed=seed, temperature=temperature, max_new_tokens=num)


def alone(engine, request):
    """The completion of a request that meets no other and finds nothing in the cache: a publication forgets it."""
    key = (prompt_of(request).tobytes(), *request[3:])
    if key not in _alone:
        engine.publish(tiny_params(), tiny_adapter(), version=0)
        _alone[key] = submit(engine, request).result(TIMEOUT_S)
    return _alone[key]


@settings(max_examples=40)
@given(
    st.lists(requests, min_size=1, max_size=14),
    st.sets(st.integers(0, 13), max_size=3),
    st.booleans(),
    st.sampled_from(["tight", "engine"]),
)
def test_neighbours_pages_and_prefixes_change_no_bit(engine, tight, mix, given_up, is_empty, which):
    """Up to 14 requests at once, some of which are given up, in a cache that has what earlier mixes left, or nothing."""
    wanted = [alone(engine, request) for request in mix]
    mixed = {"tight": tight, "engine": engine}[which]
    if is_empty:
        mixed.publish(tiny_params(), tiny_adapter(), version=0)
    futures = [submit(mixed, request) for request in mix]
    for i in given_up & set(range(len(mix))):
        futures[i].cancel()
    for future, completion in zip(futures, wanted, strict=True):
        if not future.cancelled():
            assert_same(future.result(TIMEOUT_S), completion)
    until(lambda: not mixed._running)
    assert mixed._pool.num_available == mixed.config.num_pages


def test_who_gives_pages_back_loses_nothing(engine):
    """Four requests of 30 tokens have 8 of 9 pages; 33 tokens take a third each, 49 a fourth: the last ones make room."""
    mix = [(0, 29, [token], token, 0.7, 34) for token in range(4)]
    wanted = [alone(engine, request) for request in mix]
    with small_engine(config=TIGHT) as tight:
        with tight._wake:  # all are there when the engine looks
            futures = [submit(tight, request) for request in mix]
        for future, completion in zip(futures, wanted, strict=True):
            assert_same(future.result(TIMEOUT_S), completion)
        assert tight.stats.num_preemptions > 0
        assert (len(tight._running), tight._pool.num_available) == (0, 9)


def test_a_publication_reaches_who_gave_pages_back(engine):
    """Versions of a completion never go back, whatever is computed again; the first tokens are the old policy's."""
    mix = [(beginning, 29, [7], beginning, 0.7, 34) for beginning in range(3)]
    wanted = [alone(engine, request) for request in mix]
    with small_engine(config=EngineConfig(max_requests=4, max_context=80, num_pages=6, max_step_tokens=12)) as tight:
        gate = Gate(tight, before_step=15)
        with tight._wake:
            futures = [submit(tight, request) for request in mix]
        assert gate.reached.wait(TIMEOUT_S)
        publishing = threading.Thread(target=tight.publish, args=(tiny_params(), tiny_adapter(1), 1))
        publishing.start()
        until(lambda: bool(tight._publications))
        gate.open.set()
        completions = [future.result(TIMEOUT_S) for future in futures]
        publishing.join(TIMEOUT_S)
        assert tight.stats.num_preemptions > 0
        assert tight._pool.num_available == 6
    assert {0, 1} == {version for c in completions for version in c.version_T.tolist()}
    for completion, before in zip(completions, wanted, strict=True):
        num_old = int(np.sum(completion.version_T == 0))
        assert completion.version_T.tolist() == [0] * num_old + [1] * (34 - num_old)
        np.testing.assert_array_equal(completion.token_T[:num_old], before.token_T[:num_old])


def test_mixes_compile_nothing_after_the_first_step(tight):
    sample_in(tight, [1])
    before, rng = engine_step._cache_size(), np.random.default_rng(0)
    for _ in range(200):
        futures = [
            tight.submit(
                rng.integers(0, 64, rng.integers(1, 60)),
                seed=0,
                temperature=float(rng.choice([0.0, 0.7])),
                max_new_tokens=int(rng.integers(1, 5)),
            )
            for _ in range(rng.integers(1, 8))
        ]
        for future in futures:
            future.result(TIMEOUT_S)
    assert engine_step._cache_size() == before
