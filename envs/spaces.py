"""Text as a Gymnasium space. `gymnasium.spaces.Text` draws from a listed character set; a policy may write anything."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 \n`.,-_/|<>$'\"äλ中\U0001f600"


class UnicodeText(Space[str]):
    """Every string of at most `max_length` characters that UTF-8 can encode, the empty one included.

    `sample` draws up to 64 characters of a small alphabet with letters, the characters of tool calls and some of
    other planes: an example of the space, not its uniform distribution.
    """

    def __init__(self, max_length: int, seed: int | np.random.Generator | None = None):
        """Raises ValueError unless `max_length` is positive."""
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; expected a positive number of characters")
        self.max_length = max_length
        super().__init__(shape=(), dtype=str, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Raises ValueError when a mask or probabilities are given: there is no finite set to apply them to."""
        if mask is not None or probability is not None:
            raise ValueError("UnicodeText can't be sampled with a mask or probabilities; call sample() without them")
        length = int(self.np_random.integers(1, min(64, self.max_length) + 1))
        return "".join(_ALPHABET[i] for i in self.np_random.integers(len(_ALPHABET), size=length))

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length and not any("\ud800" <= char <= "\udfff" for char in x)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash((UnicodeText, self.max_length))
