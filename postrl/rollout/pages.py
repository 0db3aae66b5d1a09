"""Who holds which page of the KV cache, and which pages serve again.

A page holds the keys and values of `page_size` neighbouring tokens (PagedAttention, arXiv 2309.06180). Full pages hang in a
tree: a node is a page, the path to it spells all tokens from a sequence's beginning, and whoever begins with these tokens
reads these pages (RadixAttention, 2312.07104). A page that is not full belongs to one sequence alone. So the members of a
group share their prompt but for the tokens of its last page, and each turn of an episode finds its history. Full pages that
nobody holds stay until their place is needed; those unused for longest go first.

Bookkeeping of the host: no page is touched here. Every page is free, or one sequence's own, or in the tree.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, field

import numpy as np


@dataclass(eq=False)
class _Node:
    """A full page."""

    page: int
    token_T: bytes
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)
    num_holders: int = 0
    """Sequences that run through this page."""
    last_used: int = 0
    """When the last of them ended; never before those of its children."""


@dataclass(eq=False)
class Sequence:
    """The pages of one sequence in order: first those of the tree, then its own."""

    pages: list[int]
    _root: _Node
    """Of the tree that its pages hang in: another one than the pool's after `clear`."""
    _nodes: list[_Node]


class PagePool:
    """
    consumes: sequences that begin (`open`), grow and end (`close`)
    waits for: nothing; `grow` answers False when there are too few pages
    unblocked by: `close`
    produces: page numbers
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))[::-1]
        self._root = _Node(-1, b"", None)
        self._num_unheld = 0
        """Pages of the tree that nobody holds."""
        self._leaves: list[tuple[int, int, _Node]] = []
        """A heap of (last use, number, node): what goes next. Of its entries those count that `_is_idle_leaf` holds for."""
        self._clock, self._number = itertools.count(1), itertools.count()

    @property
    def num_available(self) -> int:
        """Pages that `grow` could give out."""
        return len(self._free) + self._num_unheld

    def open(self, token_T: np.ndarray) -> Sequence:
        """A sequence that holds the full pages which the tree has of its tokens; the last token is never among them."""
        sequence, node = Sequence([], self._root, []), self._root
        for i in range((len(token_T) - 1) // self.page_size):
            child = node.children.get(self._spelling(token_T, i))
            if child is None:
                break
            self._hold(sequence, child)
            sequence.pages.append(child.page)
            node = child
        return sequence

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives the sequence pages of its own for `num_tokens` tokens in all. False, and nothing changes: too few are left."""
        num_missing = -(-num_tokens // self.page_size) - len(sequence.pages)
        if num_missing > self.num_available:
            return False
        sequence.pages += [self._free.pop() if self._free else self._evict() for _ in range(num_missing)]
        return True

    def share(self, sequence: Sequence, token_T: np.ndarray, num_tokens: int) -> None:
        """The first `num_tokens` of `token_T` are in its pages, or will be before anybody reads them: full ones join the tree.

        Where the tree has a page of the same tokens already, the sequence takes that one and gives its own back.
        """
        if sequence._root is not self._root:
            return  # computed with other weights
        for i in range(len(sequence._nodes), num_tokens // self.page_size):
            parent, spelling = (sequence._nodes or [self._root])[-1], self._spelling(token_T, i)
            node = parent.children.get(spelling)
            if node is None:
                node = parent.children[spelling] = _Node(sequence.pages[i], spelling, parent)
                self._num_unheld += 1
            else:
                self._free.append(sequence.pages[i])
                sequence.pages[i] = node.page
            self._hold(sequence, node)

    def close(self, sequence: Sequence) -> None:
        """Gives the sequence's own pages back and leaves those of the tree to whoever comes next."""
        self._free += sequence.pages[len(sequence._nodes) :]
        now = next(self._clock)
        for node in reversed(sequence._nodes):
            node.num_holders -= 1
            node.last_used = now
            if node.num_holders:
                continue
            if sequence._root is not self._root:
                self._free.append(node.page)
                continue
            self._num_unheld += 1
            if not node.children:
                self._add_leaf(node)
        sequence.pages, sequence._nodes = [], []

    def clear(self) -> None:
        """Forgets what the pages hold: the weights changed. Sequences keep the pages that they hold."""
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            if node.num_holders == 0:
                self._free.append(node.page)
        self._root, self._num_unheld = _Node(-1, b"", None), 0
        self._leaves.clear()

    def _spelling(self, token_T: np.ndarray, i: int) -> bytes:
        return np.asarray(token_T[i * self.page_size : (i + 1) * self.page_size], np.int32).tobytes()

    def _hold(self, sequence: Sequence, node: _Node) -> None:
        if node.num_holders == 0:
            self._num_unheld -= 1
        node.num_holders += 1
        sequence._nodes.append(node)

    def _add_leaf(self, node: _Node) -> None:
        if len(self._leaves) > 2 * self.num_pages:  # entries that no longer count
            self._leaves = [entry for entry in self._leaves if self._is_idle_leaf(entry)]
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.last_used, next(self._number), node))

    def _is_idle_leaf(self, entry: tuple[int, int, _Node]) -> bool:
        last_used, _, node = entry
        in_tree = node.parent is not None and node.parent.children.get(node.token_T) is node
        return in_tree and node.num_holders == 0 and not node.children and node.last_used == last_used

    def _evict(self) -> int:
        while not self._is_idle_leaf(entry := heapq.heappop(self._leaves)):
            pass
        node, parent = entry[2], entry[2].parent
        assert parent is not None, "the root is nobody's leaf"
        self._num_unheld -= 1
        del parent.children[node.token_T]
        if parent is not self._root and parent.num_holders == 0 and not parent.children:
            self._add_leaf(parent)
        return node.page
