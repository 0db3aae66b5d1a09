"""Every page is in one place, an open sequence's pages spell its tokens, and what is used least goes first."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from postrl.rollout.pages import PagePool, Sequence, _Node

PAGE_SIZE = 2
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)  # two tokens: most sequences share a beginning


@dataclass(eq=False)
class Open:
    """A sequence, and how many of its tokens are in its pages."""

    sequence: Sequence
    token_T: list[int]
    num_written: int


def tree(pool: PagePool) -> list[tuple[_Node, tuple[int, ...]]]:
    """(node, the tokens that its path spells) of the pool's tree."""
    found, todo = [], [(pool._root, ())]
    while todo:
        node, path = todo.pop()
        for spelling, child in node.children.items():
            assert child.token_T == spelling
            assert child.parent is node
            todo.append((child, (*path, *np.frombuffer(spelling, np.int32).tolist())))
        found.append((node, path))
    return found[1:]


def snapshot(pool: PagePool):
    held = [(node.page, path, node.num_holders) for node, path in tree(pool)]
    return list(pool._free), [(used, node.page) for used, _, node in pool._leaves], held


class Pool(RuleBasedStateMachine):
    """Uses a pool as the engine does, and keeps what a device would have in its pages: (token, version of the weights)."""

    def __init__(self):
        super().__init__()
        self.pool, self.version = PagePool(7, PAGE_SIZE), 0
        self.open: list[Open] = []
        self.contents: dict[int, list[tuple[int, int]]] = {}

    def chosen(self, index: int) -> Open:
        return self.open[index % len(self.open)]

    @rule(token_T=tokens)
    def begin(self, token_T):
        before = self.pool.num_available
        longest = max(
            (
                len(path)
                for _, path in tree(self.pool)
                if path == tuple(token_T[: len(path)]) and len(path) < len(token_T)
            ),
            default=0,
        )
        sequence = self.pool.open(np.array(token_T))
        assert len(sequence.pages) * PAGE_SIZE == longest < len(token_T)
        assert before - len(sequence.pages) <= self.pool.num_available <= before
        self.open.append(Open(sequence, token_T, longest))

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), num_tokens=st.integers(0, 18))
    def grow(self, index, num_tokens):
        """`num_tokens` may exceed what the sequence has: its pages are then there before its tokens."""
        sequence = self.chosen(index).sequence
        pages, before, available = list(sequence.pages), snapshot(self.pool), self.pool.num_available
        missing = max(0, -(-num_tokens // PAGE_SIZE) - len(pages))
        assert self.pool.grow(sequence, num_tokens) == (missing <= available)
        if missing > available:
            assert (sequence.pages, snapshot(self.pool)) == (pages, before)
            return
        assert sequence.pages[: len(pages)] == pages
        assert len(sequence.pages) == len(pages) + missing
        assert self.pool.num_available == available - missing
        for page in sequence.pages[len(pages) :]:
            self.contents.pop(page, None)

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), num_tokens=st.integers(1, 9))
    def write_and_share(self, index, num_tokens):
        chosen = self.chosen(index)
        pages = chosen.sequence.pages
        end = min(chosen.num_written + num_tokens, len(chosen.token_T), len(pages) * PAGE_SIZE)
        for t in range(chosen.num_written, end):
            if t % PAGE_SIZE == 0:
                self.contents[pages[t // PAGE_SIZE]] = []
            self.contents[pages[t // PAGE_SIZE]].append((chosen.token_T[t], self.version))
        chosen.num_written = max(chosen.num_written, end)
        self.pool.share(chosen.sequence, np.array(chosen.token_T), chosen.num_written)
        if chosen.sequence._root is self.pool._root:
            assert len(chosen.sequence._nodes) == chosen.num_written // PAGE_SIZE

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), token=st.integers(0, 1))
    def sample(self, index, token):
        self.chosen(index).token_T = [*self.chosen(index).token_T, token]

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9))
    def close(self, index):
        chosen = self.chosen(index)
        self.open.remove(chosen)
        self.pool.close(chosen.sequence)
        assert chosen.sequence.pages == []

    @rule()
    def clear(self):
        self.pool.clear()
        self.version += 1
        assert tree(self.pool) == []

    @rule()
    def exhaust(self):
        """What is said to be available is: the last page of it, and no more."""
        available, sequence = self.pool.num_available, self.pool.open(np.zeros(1, np.int32))
        assert not self.pool.grow(sequence, available * PAGE_SIZE + 1)
        assert self.pool.grow(sequence, available * PAGE_SIZE)
        assert self.pool.num_available == 0
        for page in sequence.pages:
            self.contents.pop(page, None)
        self.pool.close(sequence)
        assert self.pool.num_available == available

    @invariant()
    def every_page_is_in_one_place(self):
        own = [page for o in self.open for page in o.sequence.pages[len(o.sequence._nodes) :]]
        older = {n for o in self.open if o.sequence._root is not self.pool._root for n in o.sequence._nodes}
        places = [*self.pool._free, *own, *(n.page for n, _ in tree(self.pool)), *(n.page for n in older)]
        assert Counter(places) == Counter(range(self.pool.num_pages))

    @invariant()
    def holders_and_what_is_available_are_counted(self):
        holders = Counter(node for o in self.open for node in o.sequence._nodes)
        nodes = [node for node, _ in tree(self.pool)]
        assert all(node.num_holders == holders[node] for node in [*nodes, *holders])
        unheld = [node for node in nodes if not holders[node]]
        leaves = [entry[2] for entry in self.pool._leaves if self.pool._is_idle_leaf(entry)]
        assert Counter(leaves) == Counter(node for node in unheld if not node.children)
        assert self.pool.num_available == len(self.pool._free) + len(unheld)

    @invariant()
    def pages_hold_what_they_spell(self):
        """A sequence's pages its tokens; the tree's pages tokens that were computed with the present weights."""
        for o in self.open:
            written = [token for page in o.sequence.pages for token, _ in self.contents.get(page, ())]
            assert written == o.token_T[: o.num_written]
            assert [n.page for n in o.sequence._nodes] == o.sequence.pages[: len(o.sequence._nodes)]
        for node, path in tree(self.pool):
            assert self.contents[node.page] == [(token, self.version) for token in path[-PAGE_SIZE:]]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=300, stateful_step_count=40)


# ------------------------------------------------------------------------------------------------------------ by hand


def computed(pool, *token_T):
    """A sequence whose tokens are all in its pages."""
    sequence = pool.open(np.array(token_T))
    assert pool.grow(sequence, len(token_T))
    pool.share(sequence, np.array(token_T), len(token_T))
    return sequence


def use(pool, *token_T):
    pool.close(computed(pool, *token_T))


def num_found(pool, *token_T):
    """How many pages of the tokens the tree has. Asking is a use."""
    sequence = pool.open(np.array(token_T))
    num = len(sequence.pages)
    pool.close(sequence)
    return num


def take_one(pool):
    sequence = pool.open(np.zeros(1, np.int32))
    assert pool.grow(sequence, 1)
    return sequence


@pytest.mark.parametrize(("length", "num_pages"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2)])
def test_the_last_token_is_never_found(length, num_pages):
    """Something must be computed to sample from. Of a page that is only begun nothing is found."""
    pool = PagePool(9, PAGE_SIZE)
    use(pool, 1, 2, 3, 4, 5)
    assert num_found(pool, *[1, 2, 3, 4, 5, 6, 7][:length]) == num_pages


def test_the_same_tokens_after_others_are_other_pages():
    pool = PagePool(9, PAGE_SIZE)
    use(pool, 1, 2, 3, 4)
    assert num_found(pool, 3, 4, 9) == 0
    assert num_found(pool, 1, 2, 9) == 1
    assert num_found(pool, 1, 2, 3, 5, 9) == 1


def test_unused_for_longest_goes_first():
    pool = PagePool(3, PAGE_SIZE)
    for token in (1, 2, 3):
        use(pool, token, token)
    assert num_found(pool, 1, 1, 9) == 1  # a use: now 2, 3, 1
    held = [take_one(pool)]
    assert num_found(pool, 2, 2, 9) == 0
    assert num_found(pool, 3, 3, 9) == 1  # now 1, 3
    held.append(take_one(pool))
    assert (num_found(pool, 1, 1, 9), num_found(pool, 3, 3, 9)) == (0, 1)
    held.append(take_one(pool))
    assert (num_found(pool, 3, 3, 9), pool.num_available) == (0, 0)


def test_free_pages_are_taken_before_cached_ones_and_ends_before_beginnings():
    pool = PagePool(3, PAGE_SIZE)
    use(pool, 1, 1, 2, 2)
    held = [take_one(pool)]
    assert num_found(pool, 1, 1, 2, 2, 9) == 2
    held.append(take_one(pool))
    assert num_found(pool, 1, 1, 2, 2, 9) == 1
    held.append(take_one(pool))
    assert num_found(pool, 1, 1, 2, 2, 9) == 0


def test_a_beginning_in_use_outlives_an_end_that_is_not():
    """1 1 | 2 2, then 3 3, then 1 1 alone: unused for longest are 2 2, 3 3, 1 1 in this order."""
    pool = PagePool(3, PAGE_SIZE)
    use(pool, 1, 1, 2, 2)
    use(pool, 3, 3)
    assert num_found(pool, 1, 1, 9) == 1
    held = [take_one(pool), take_one(pool)]
    assert len(held) == 2
    assert (num_found(pool, 1, 1, 9), num_found(pool, 3, 3, 9)) == (1, 0)


def test_held_pages_are_not_evicted():
    pool = PagePool(2, PAGE_SIZE)
    held = computed(pool, 1, 1)
    use(pool, 2, 2)
    other = take_one(pool)
    assert not pool.grow(other, PAGE_SIZE + 1)
    assert (num_found(pool, 1, 1, 9), num_found(pool, 2, 2, 9)) == (1, 0)
    pool.close(held)
    assert pool.grow(other, PAGE_SIZE + 1)
    assert num_found(pool, 1, 1, 9) == 0


def test_sharing_swaps_duplicates():
    """Two compute the same page at once: the second takes the first's and gives its own back."""
    pool = PagePool(4, PAGE_SIZE)
    token_T = np.array([1, 2, 3])
    first, second = pool.open(token_T), pool.open(token_T)
    assert pool.grow(first, 3)
    assert pool.grow(second, 3)
    (a, b), (c, d) = first.pages, second.pages
    assert (len({a, b, c, d}), pool.num_available) == (4, 0)
    pool.share(first, token_T, 3)
    assert (first.pages, second.pages, pool.num_available) == ([a, b], [c, d], 0)
    pool.share(second, token_T, 1)  # its page isn't full yet
    assert second.pages == [c, d]
    pool.share(second, token_T, 3)
    assert (first.pages, second.pages, pool.num_available) == ([a, b], [a, d], 1)
    pool.close(first)
    assert pool.num_available == 2
    pool.close(second)
    assert pool.num_available == 4


def test_clearing_forgets_and_held_pages_come_back_at_the_end():
    pool = PagePool(6, PAGE_SIZE)
    use(pool, 1, 1, 2, 2, 3, 3)
    first, second = pool.open(np.array([1, 1, 2, 2, 9])), pool.open(np.array([1, 1, 9]))
    assert (len(first.pages), len(second.pages), pool.num_available) == (2, 1, 4)
    pages = list(first.pages)
    pool.clear()
    assert (num_found(pool, 1, 1, 9), pool.num_available, first.pages) == (0, 4, pages)
    assert pool.grow(first, 6)
    pool.share(first, np.array([1, 1, 2, 2, 9, 9]), 6)  # computed with the old weights, in part
    assert (num_found(pool, 1, 1, 9), first.pages[:2]) == (0, pages)
    pool.close(first)
    assert pool.num_available == 5  # the page that the second reads stays
    pool.close(second)
    assert pool.num_available == 6
