"""A tree of full pages, keyed by their tokens: a prompt that begins like an earlier one shares its pages.

Each page is stored with the drafter whose context it carries, and one node of the tree may hold a page for each of
several drafters. A drafting request takes only pages with its own drafter's context; a plain request takes any. If the
target is recurrent, a usable prefix ends at the last page after which a recurrent state was saved.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.cache.pages import PageTable
from slipstream.cache.recurrent import StatePool, page_key


@dataclass(slots=True, eq=False)
class _Page:
    page: int
    epoch: int
    last_used: int


@dataclass(slots=True, eq=False)
class _Node:
    parent: _Node | None
    tokens: tuple[int, ...]
    pages: dict[str | None, _Page] = field(
        default_factory=dict
    )  # by draft key (None: no draft context); empty in the root
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)

    def usable(self, draft_key: str | None) -> _Page | None:
        return next(iter(self.pages.values())) if draft_key is None else self.pages.get(draft_key)


class PrefixCache:
    """Holds one reference on every page it remembers, and evicts the least recently used leaves."""

    def __init__(self, table: PageTable, page_tokens: int, states: StatePool | None = None) -> None:
        self._table = table
        self._states = states
        self._page_tokens = page_tokens
        self._root = _Node(None, ())
        self.nodes: set[_Node] = set()  # every node but the root
        self._clock = 0
        self.size = 0  # pages the cache holds; any thread may read it
        self.hits = 0
        self.failed_restores = 0
        self.last_match = (
            0  # tokens of the last prompt whose pages were found, also those without a saved recurrent state
        )

    def take(self, tokens: Sequence[int], draft_key: str | None) -> list[int]:
        """Returns the pages of the longest usable prefix and adds a reference to each for the caller.

        At least one token of the prompt is always left to compute, because the first new token needs its logits.
        """
        node, pages = self._root, []
        self._clock += 1
        for chunk in self._chunks(tokens, (len(tokens) - 1) // self._page_tokens):
            child = node.children.get(chunk)
            found = child.usable(draft_key) if child is not None else None
            if child is None or found is None:
                break
            if self._table.epoch(found.page) != found.epoch or not self._table.holders(found.page):
                # The page was freed or reused although the cache lists it: drop it, and the prompt is computed again.
                self.failed_restores += 1
                self._forget_branch(child)
                break
            found.last_used = self._clock
            pages.append(found.page)
            node = child
        self.last_match = len(pages) * self._page_tokens
        while pages and not self._resumable(pages[-1]):
            pages.pop()
        self._table.share(pages)
        self.hits += bool(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Undoes a `take` for a request that could not start."""
        self._table.release(pages)
        self.hits -= bool(pages)

    def put(self, tokens: Sequence[int], pages: Sequence[int], draft_key: str | None) -> None:
        """Remembers the full pages of `tokens`; `draft_key` names the drafter whose context the pages carry."""
        node = self._root
        self._clock += 1
        for chunk, page in zip(self._chunks(tokens, len(tokens) // self._page_tokens), pages, strict=False):
            child = node.children.get(chunk)
            if child is None:
                child = node.children[chunk] = _Node(node, chunk)
                self.nodes.add(child)
            known, own = (child.usable(draft_key) if child.pages else None), child.pages.get(draft_key)
            if known is None or (known is own and self._resumable(page) and not self._resumable(own.page)):
                self._table.share([page])
                self.size += 1
                known = child.pages[draft_key] = _Page(page, self._table.epoch(page), self._clock)
                if own is not None:
                    # a page with a recurrent state replaces the page of the same tokens that has none
                    self._release(own)
                if draft_key is not None and None in child.pages:
                    # a page with draft context replaces the page of the same tokens that has none
                    self._release(child.pages.pop(None))
            known.last_used = self._clock
            node = child

    def _resumable(self, page: int) -> bool:
        """Whether a sequence can continue after this page; a recurrent target also needs the state kept there."""
        return self._states is None or self._states.has(page_key(self._table, page))

    def evict(self, pages_wanted: int) -> int:
        """Frees up to this many pages that only the cache holds, oldest leaves first; returns how many it freed."""
        if pages_wanted <= 0:
            return 0
        order = itertools.count()  # breaks ties, because heap entries of the same age must not compare nodes
        leaves = [
            (found.last_used, next(order), node, key)
            for node in self.nodes
            for key, found in self._evictable_pages(node)
        ]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < pages_wanted:
            _, _, node, key = heapq.heappop(leaves)
            if node not in self.nodes or not any(key == free for free, _ in self._evictable_pages(node)):
                continue  # out of date: the page is gone, or it is now the only page of a node with children
            self._forget_page(node, key)
            freed += 1
            # the page's parent may have become a leaf, and may be older than the leaves in the heap
            for near in (node, node.parent):
                if near in self.nodes:
                    for free, found in self._evictable_pages(near):
                        heapq.heappush(leaves, (found.last_used, next(order), near, free))
        return freed

    def _evictable_pages(self, node: _Node) -> list[tuple[str | None, _Page]]:
        """Returns the pages of a node that can be evicted now, with their draft keys."""
        return [
            (key, found)
            for key, found in node.pages.items()
            if self._table.holders(found.page) == 1 and _is_leaf(node, key)
        ]

    def evictable(self, enough: int | None = None) -> int:
        """Counts the pages that eviction could free: no request holds them, and no page that must stay depends on them.

        Counting stops at `enough`, so that finding a few pages does not walk through the whole of a large cache.
        """
        stuck: set[int] = set()  # pages that cannot be freed
        kept: set[int] = set()  # ids of nodes that keep at least one page
        count = 0
        for top in self._root.children.values():
            for node in _leaves_first(top):
                if enough is not None and count >= enough:
                    return count
                count += self._count_removable(node, stuck, kept)
        return count

    def held(self) -> list[int]:
        return [found.page for node in self.nodes for found in node.pages.values()]

    def forget(self, draft_key: str) -> None:
        """Releases every page that carries this draft context, because its drafter has been removed."""
        for node in [node for node in self.nodes if draft_key in node.pages]:
            if node in self.nodes:  # an earlier round may have removed it together with its branch
                self._forget_page(node, draft_key)

    def clear(self) -> None:
        for child in list(self._root.children.values()):
            self._forget_branch(child)

    def _chunks(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        size = self._page_tokens
        return [tuple(tokens[i * size : (i + 1) * size]) for i in range(count)]

    def _forget_page(self, node: _Node, draft_key: str | None) -> None:
        """Removes a page of a node; a node without pages is removed together with everything after it."""
        if len(node.pages) > 1:
            self._release(node.pages.pop(draft_key))
        else:
            self._forget_branch(node)

    def _forget_branch(self, node: _Node) -> None:
        stack = [node]
        if node.parent is not None:
            del node.parent.children[node.tokens]
        while stack:
            gone = stack.pop()
            stack += gone.children.values()
            self.nodes.discard(gone)
            for found in gone.pages.values():
                self._release(found)

    def _release(self, found: _Page) -> None:
        self.size -= 1
        if self._table.epoch(found.page) == found.epoch and self._table.holders(found.page):
            self._table.release([found.page])
            if self._states is not None:
                self._states.forget_free(self._table, [found.page])

    def _count_removable(self, node: _Node, stuck: set[int], kept: set[int]) -> int:
        """Counts how many pages of a node eviction could free, after its children have been counted."""
        children = node.children.values()
        staying = [
            found.page
            for key, found in node.pages.items()
            if self._table.holders(found.page) > 1
            or any(key in child.pages and child.pages[key].page in stuck for child in children)
        ]
        stuck.update(staying)
        # a node that stays must remain reachable, so its parent keeps at least one page
        leading = bool(staying) or any(id(child) in kept for child in children)
        if leading:
            kept.add(id(node))
        return len(node.pages) - max(len(staying), int(leading))


def _leaves_first(top: _Node) -> Iterator[_Node]:
    """Yields the nodes of a branch, each after its children; recursion could exceed Python's stack."""
    path = [(top, iter(top.children.values()))]
    while path:
        node, children = path[-1]
        child = next(children, None)
        if child is None:
            path.pop()
            yield node
        else:
            path.append((child, iter(child.children.values())))


def _is_leaf(node: _Node, draft_key: str | None) -> bool:
    """Whether no child has a page with this draft key; a node's only page also needs the node to have no children."""
    if len(node.pages) == 1:
        return not node.children
    return not any(draft_key in child.pages for child in node.children.values())
