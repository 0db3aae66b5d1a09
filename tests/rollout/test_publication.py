"""A new policy takes effect between two steps, for whoever runs too; what older ones computed serves no later request."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from postrl.rollout.engine import Engine, tree_digest
from tests.policy.tiny import MODEL, tiny_adapter, tiny_params
from tests.rollout.plain import (
    CONFIG,
    NO_EOS,
    TIMEOUT_S,
    Gate,
    assert_same,
    plain_sample,
    sample_in,
    small_engine,
    until,
)

PROMPT = np.random.default_rng(2).integers(0, 64, 40).astype(np.int32)


def test_a_publication_takes_effect_and_forgets_prefixes():
    with small_engine() as engine:
        assert set(sample_in(engine, PROMPT).version_T) == {0}
        newer = jax.tree.map(jnp.copy, tiny_adapter(1))
        digest = engine.publish(tiny_params(), newer, version=5)
        assert digest == engine.digest() == tree_digest(tiny_adapter(1)) != tree_digest(tiny_adapter(0))
        for leaf in jax.tree.leaves(newer):
            leaf.delete()  # as the learner's donation does
        before = engine.stats.num_prefilled_tokens
        completion = sample_in(engine, PROMPT)
        assert engine.stats.num_prefilled_tokens - before == 40
        tokens, logprobs = plain_sample(PROMPT, 6, adapter_seed=1)
        assert completion.token_T.tolist() == tokens.tolist() != plain_sample(PROMPT, 6)[0].tolist()
        np.testing.assert_allclose(completion.logprob_T, logprobs, atol=1e-5, rtol=0)
        assert set(completion.version_T) == {5}


@pytest.mark.parametrize("before_step", [1, 2, 12])
def test_requests_that_run_go_on(before_step):
    """The prompt takes two steps; the token of the step that is being computed is still the old policy's."""
    num_old = before_step  # steps 1, 2, ... sample a token each
    with small_engine() as engine:
        gate = Gate(engine, before_step=before_step)
        running = engine.submit(PROMPT, seed=0, temperature=0.0, max_new_tokens=20)
        assert gate.reached.wait(TIMEOUT_S)
        waiting = engine.submit(PROMPT, seed=0, temperature=0.0, max_new_tokens=20)
        digests = []
        publishing = threading.Thread(target=lambda: digests.append(engine.publish(tiny_params(), tiny_adapter(1), 5)))
        publishing.start()
        until(lambda: bool(engine._publications))
        assert not digests
        gate.open.set()
        across, after = running.result(TIMEOUT_S), waiting.result(TIMEOUT_S)
        publishing.join(TIMEOUT_S)
        assert digests == [tree_digest(tiny_adapter(1))]
        assert across.version_T.tolist() == [0] * num_old + [5] * (20 - num_old)
        assert across.token_T[:num_old].tolist() == plain_sample(PROMPT, num_old)[0].tolist()
        # What began after the publication found nothing of the old policy's, though its pages were still being read.
        assert engine.stats.num_prefilled_tokens == 80
        assert set(after.version_T) == {5}
        assert after.token_T.tolist() == plain_sample(PROMPT, 20, adapter_seed=1)[0].tolist()
        assert engine._pool.num_available == CONFIG.num_pages
        before = engine.stats.num_prefilled_tokens
        assert_same(sample_in(engine, PROMPT, max_new_tokens=20), after)
        assert engine.stats.num_prefilled_tokens - before == 8  # it found the later request's


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
    assert_same(got, wanted)


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
