"""Text of any characters as a Gymnasium space."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.spaces import UnicodeText


@given(st.text(max_size=50))
def test_contains_what_utf8_can_encode(text):
    assert text in UnicodeText(50)


@pytest.mark.parametrize("value", ["a" * 51, "\ud800", "a\udfffb", 3, None, b"a"])
def test_contains_nothing_else(value):
    assert value not in UnicodeText(50)


def test_samples_are_contained_and_follow_the_seed():
    space = UnicodeText(50)
    space.seed(3)
    first = [space.sample() for _ in range(20)]
    space.seed(3)
    assert first == [space.sample() for _ in range(20)]
    assert all(text in space for text in first)
    assert len(set(first)) > 10


def test_equality_repr_and_errors():
    assert UnicodeText(5) == UnicodeText(5) != UnicodeText(6)
    assert repr(UnicodeText(5)) == "UnicodeText(5)"
    with pytest.raises(ValueError, match="expected a positive number"):
        UnicodeText(0)
    with pytest.raises(ValueError, match="without them"):
        UnicodeText(5).sample(mask=(1, None))
