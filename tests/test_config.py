"""The configuration stays small, and its fingerprint covers everything that decides a result."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from postrl.config import DomainConfig, RlConfig, RunConfig, num_leaf_fields
from postrl.learner.batch import RowShape
from postrl.learner.losses import PolicyGradient
from postrl.rollout.engine import EngineConfig
from postrl.run_state import rl_learning_rate

CONFIG = RunConfig("a", domains={"shell": DomainConfig()})
WHERE_IT_IS_WRITTEN = {"name", "runs_dir", "wandb_project"}


def children(node) -> dict:
    if isinstance(node, dict):
        return node
    return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}


def leaves(node, path=()):
    """(path, value) of every leaf field."""
    for name, value in children(node).items():
        if dataclasses.is_dataclass(value) or isinstance(value, dict):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name), value


def with_leaf(node, path, value):
    head, *rest = path
    new = with_leaf(children(node)[head], rest, value) if rest else value
    return {**node, head: new} if isinstance(node, dict) else dataclasses.replace(node, **{head: new})


def changed(value):
    """Another valid value of the same kind."""
    match value:
        case bool():
            return not value
        case int():  # downwards where there is room: some are bounded by others from above
            return value - 1 if value > 2 else value + 1
        case float():
            return value / 2 + 0.25
        case str():
            return value + "x"
        case Path():
            return value / "x"
        case tuple():
            return (*value, value[-1])
    raise AssertionError(f"a leaf of type {type(value)}: teach this test how to change it")


def test_at_most_80_fields():
    assert num_leaf_fields(CONFIG) == len(list(leaves(CONFIG))) <= 80


def test_more_domains_are_no_more_fields():
    many = dataclasses.replace(CONFIG, domains={name: DomainConfig() for name in "abcdefgh"})
    assert num_leaf_fields(many) == num_leaf_fields(CONFIG)
    assert many.fingerprint != CONFIG.fingerprint


def test_fields_of_nested_variants_count():
    @dataclasses.dataclass(frozen=True)
    class Two:
        a: int = 0
        loss: PolicyGradient = dataclasses.field(default_factory=PolicyGradient)

    assert num_leaf_fields(Two()) == 3


ONE_VALID_VALUE = {("rl", "max_off_policy_steps")}


@pytest.mark.parametrize("path", [path for path, _ in leaves(CONFIG) if path not in ONE_VALID_VALUE], ids=".".join)
def test_the_fingerprint_covers_what_decides_the_result(path):
    value = dict(leaves(CONFIG))[path]
    other = with_leaf(CONFIG, path, changed(value))
    if len(path) == 1 and path[0] in WHERE_IT_IS_WRITTEN:
        assert other.fingerprint == CONFIG.fingerprint
    else:
        assert other.fingerprint != CONFIG.fingerprint


def test_equal_configs_have_equal_fingerprints():
    assert (
        RunConfig("b", runs_dir=Path("elsewhere"), domains={"shell": DomainConfig()}).fingerprint == CONFIG.fingerprint
    )
    assert len(CONFIG.fingerprint) == 16
    assert int(CONFIG.fingerprint, 16) >= 0


def test_it_becomes_json_with_every_field():
    written = json.loads(json.dumps(CONFIG.to_json()))
    assert written["learner"]["row_shapes"][0] == dataclasses.asdict(CONFIG.learner.row_shapes[0])
    assert written["runs_dir"] == "runs"
    for path, _ in leaves(CONFIG):
        node = written
        for name in path:
            node = node[name]


def test_the_run_directory():
    assert dataclasses.replace(CONFIG, name="toy", runs_dir=Path("/data/runs")).run_dir == Path("/data/runs/toy")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RlConfig(group_size=1), "rl.group_size is 1; a group needs at least 2"),
        (lambda: RlConfig(max_off_policy_steps=1), "rl.max_off_policy_steps is 1; only 0"),
        (lambda: RlConfig(temperature=0.0), "rl.temperature is 0.0; it must be positive"),
        (lambda: RlConfig(temperature=-1.0), "rl.temperature is -1.0"),
        (lambda: RunConfig("a"), "domains is empty; name at least one"),
        (lambda: RunConfig("a", domains={"x": DomainConfig(groups_per_step=0)}), "no domain has groups_per_step > 0"),
        (
            lambda: EngineConfig(max_context=100, num_pages=6),
            r"num_pages 6 hold 96 tokens, fewer than one request may have \(max_context 100\)",
        ),
        (
            lambda: EngineConfig(max_requests=9, max_step_tokens=8),
            "max_step_tokens 8 must be at least max_requests 9",
        ),
    ],
)
def test_impossible_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_configs_are_values():
    assert dataclasses.replace(CONFIG) == CONFIG
    assert hash(RowShape(1, 2)) == hash(RowShape(1, 2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.seed = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("rl", "expected"),
    [
        (RlConfig(num_steps=5, num_warmup_steps=0), [1, 1, 1, 1, 1]),
        (RlConfig(num_steps=5, num_warmup_steps=2), [1 / 2, 3 / 4, 1, 1, 1]),
        (RlConfig(num_steps=7, num_warmup_steps=1, num_decay_steps=3), [1, 1, 1, 1, 3 / 4, 1 / 2, 1 / 4]),
        (RlConfig(num_steps=4, num_warmup_steps=0, num_decay_steps=4), [4 / 5, 3 / 5, 2 / 5, 1 / 5]),
    ],
)
def test_the_learning_rate_rises_and_falls(rl, expected):
    schedule = rl_learning_rate(rl)
    np.testing.assert_allclose([schedule(i) / rl.learning_rate for i in range(rl.num_steps)], expected, rtol=1e-6)


def test_a_rate_that_rises_and_falls_for_longer_than_the_run_is_refused():
    with pytest.raises(ValueError, match=r"num_warmup_steps 3 and rl.num_decay_steps 2 must fit into rl.num_steps 4"):
        RlConfig(num_steps=4, num_warmup_steps=3, num_decay_steps=2)
