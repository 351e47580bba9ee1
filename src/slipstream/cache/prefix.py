"""A tree of full pages by their tokens: a prompt that begins like an earlier one takes its pages over.

A page remembers which drafter's context it carries; a drafting request takes only pages with its own. Where the
target is recurrent, a prefix ends at the last page whose state was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.cache.pages import PageTable
from slipstream.cache.recurrent import StatePool, page_key


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None
    tokens: tuple[int, ...]
    page: int
    epoch: int
    draft_key: str | None
    last_used: int
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixCache:
    """Holds one reference on every page it remembers; evicts the least recently used leaves."""

    def __init__(self, table: PageTable, page_tokens: int, states: StatePool | None = None) -> None:
        self._table = table
        self._states = states
        self._page_tokens = page_tokens
        self._root = _Node(None, (), -1, 0, None, 0)
        self._nodes: set[_Node] = set()
        self._clock = 0
        self.hits = 0
        self.failed_restores = 0
        self.last_match = 0  # tokens of the last prompt that were known, whether or not they could be taken

    def take(self, tokens: Sequence[int], draft_key: str | None) -> list[int]:
        """Pages of the longest usable prefix, shared for the caller; at least one token is always left to run."""
        node, pages = self._root, []
        self._clock += 1
        for chunk in self._chunks(tokens, (len(tokens) - 1) // self._page_tokens):
            child = node.children.get(chunk)
            if child is None or (draft_key is not None and child.draft_key != draft_key):
                break
            if self._table.epoch(child.page) != child.epoch or not self._table.holders(child.page):
                # the page was handed out to somebody else: forget it and let the prompt be computed again
                self.failed_restores += 1
                self._forget_branch(child)
                break
            child.last_used = self._clock
            pages.append(child.page)
            node = child
        self.last_match = len(pages) * self._page_tokens
        while pages and not self._resumable(pages[-1]):
            pages.pop()
        self._table.share(pages)
        self.hits += bool(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Undoes a take whose request could not start after all."""
        self._table.release(pages)
        self.hits -= bool(pages)

    def put(self, tokens: Sequence[int], pages: Sequence[int], draft_key: str | None) -> None:
        """Remembers the full pages of `tokens`; `draft_key` names the drafter whose context they carry."""
        node = self._root
        self._clock += 1
        for chunk, page in zip(self._chunks(tokens, len(tokens) // self._page_tokens), pages, strict=False):
            child = node.children.get(chunk)
            if child is None:
                child = _Node(node, chunk, page, self._table.epoch(page), draft_key, self._clock)
                self._table.share([page])
                node.children[chunk] = child
                self._nodes.add(child)
            elif self._richer(page, draft_key, child):
                # the same tokens, now with draft context or a state: the richer page replaces the poorer one
                self._table.share([page])
                self._release(child.page)
                child.page, child.epoch, child.draft_key = page, self._table.epoch(page), draft_key
            child.last_used = self._clock
            node = child

    def _richer(self, page: int, draft_key: str | None, child: _Node) -> bool:
        if child.draft_key != draft_key:
            return child.draft_key is None
        return self._resumable(page) and not self._resumable(child.page)

    def _resumable(self, page: int) -> bool:
        """Whether a sequence can go on behind a page; attention needs nothing but the pages."""
        return self._states is None or self._states.has(page_key(self._table, page))

    def _release(self, page: int) -> None:
        self._table.release([page])
        if self._states is not None:
            self._states.forget_free(self._table, [page])

    def evict(self, pages_wanted: int) -> int:
        """Frees up to this many pages nobody else holds, oldest leaves first; returns how many came free."""
        freed = 0
        while freed < pages_wanted:
            leaves = [n for n in self._nodes if not n.children and self._table.holders(n.page) == 1]
            if not leaves:
                break
            # one at a time: a parent that becomes a leaf may be older than the leaves still there
            self._forget_branch(min(leaves, key=lambda n: n.last_used))
            freed += 1
        return freed

    def evictable(self) -> int:
        """Pages eviction could free: a node counts when it and everything below it is held by the cache alone."""
        return sum(self._removable(child) for child in self._root.children.values())

    def held(self) -> list[int]:
        return [node.page for node in self._nodes]

    def clear(self) -> None:
        for child in list(self._root.children.values()):
            self._forget_branch(child)

    def _chunks(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        size = self._page_tokens
        return [tuple(tokens[i * size : (i + 1) * size]) for i in range(count)]

    def _forget_branch(self, node: _Node) -> None:
        stack = [node]
        if node.parent is not None:
            del node.parent.children[node.tokens]
        while stack:
            gone = stack.pop()
            stack += gone.children.values()
            self._nodes.discard(gone)
            if self._table.epoch(gone.page) == gone.epoch and self._table.holders(gone.page):
                self._release(gone.page)

    def _removable(self, top: _Node) -> int:
        order, stack = [], [top]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += node.children.values()
        kept: set[int] = set()
        count = 0
        for node in reversed(order):
            if self._table.holders(node.page) > 1 or any(id(child) in kept for child in node.children.values()):
                kept.add(id(node))
            else:
                count += 1
        return count
