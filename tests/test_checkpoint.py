"""Checkpoints give back the very bits, survive being written twice, and never leave a run without one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from postrl.checkpoint import Checkpoints
from postrl.learner.step import TrainState, init_state
from postrl.rollout.engine import tree_digest
from tests.policy.tiny import tiny_adapter

OPTIMIZER = optax.adamw(1e-3)


def some_state(seed: int) -> TrainState:
    """Moments and steps away from zero; NaN payloads, infinities, subnormals and -0.0 among the values."""
    state = init_state(tiny_adapter(seed), OPTIMIZER)
    rng = np.random.default_rng(seed)

    def bits(x):
        if x.dtype == jnp.float32:
            return jnp.asarray(rng.integers(0, 2**32, x.shape, np.uint32).view(np.float32))
        return jnp.full(x.shape, 7 + seed, x.dtype)

    return jax.tree.map(bits, state)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "checkpoints"


def like() -> TrainState:
    return init_state(tiny_adapter(), OPTIMIZER)


def test_every_bit_comes_back_in_another_process(path):
    saved = some_state(1)
    first = Checkpoints(path)
    name = first.save(3, saved)
    first.close()
    second = Checkpoints(path)
    restored = second.restore(name, like())
    second.close()
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert tree_digest(restored) == tree_digest(saved)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_a_version_may_be_written_again_after_a_crash(path):
    """The run was killed after writing version 4, before its journal said so: it trains the step again, and saves."""
    before = Checkpoints(path)
    before.save(4, some_state(1))
    before.close()
    after = Checkpoints(path)
    name = after.save(4, some_state(2))
    assert tree_digest(after.restore(name, like())) == tree_digest(some_state(2))
    after.close()


def test_the_cold_start_is_never_dropped(path):
    """Version 0 is where each resume begins."""
    checkpoints = Checkpoints(path)
    names = [checkpoints.save(version, some_state(version)) for version in range(5)]
    assert sorted(p.name for p in path.iterdir() if p.name.isdigit()) == ["0", "3", "4"]
    assert tree_digest(checkpoints.restore(names[0], like())) == tree_digest(some_state(0))
    checkpoints.close()


@pytest.mark.parametrize(("max_to_keep", "kept"), [(1, 2), (2, 2), (3, 3)])
def test_at_least_two_are_kept(path, max_to_keep, kept):
    checkpoints = Checkpoints(path, max_to_keep)
    names = [checkpoints.save(version, some_state(version)) for version in range(1, 5)]
    assert sorted(p.name for p in path.iterdir() if p.name.isdigit()) == names[-kept:]
    for version in range(5 - kept, 5):
        restored = checkpoints.restore(names[version - 1], like())
        assert tree_digest(restored) == tree_digest(some_state(version))
    checkpoints.close()
