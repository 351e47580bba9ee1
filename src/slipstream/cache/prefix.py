"""A tree of full pages by their tokens: a prompt that begins like an earlier one takes its pages over.

A page remembers which drafter's context it carries, and pages of several drafters may stand at one place side by side;
a drafting request takes only pages with its own, a plain one takes any. Where the target is recurrent, a prefix ends at
the last page whose state was kept.
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
    pages: dict[str | None, _Page] = field(default_factory=dict)  # by draft key; never empty but at the root
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)

    def usable(self, draft_key: str | None) -> _Page | None:
        return next(iter(self.pages.values())) if draft_key is None else self.pages.get(draft_key)


class PrefixCache:
    """Holds one reference on every page it remembers; evicts the least recently used leaves."""

    def __init__(self, table: PageTable, page_tokens: int, states: StatePool | None = None) -> None:
        self._table = table
        self._states = states
        self._page_tokens = page_tokens
        self._root = _Node(None, ())
        self.nodes: set[_Node] = set()  # every node but the root
        self._clock = 0
        self.size = 0  # pages it holds; any thread may look
        self.hits = 0
        self.failed_restores = 0
        self.last_match = 0  # tokens of the last prompt that were known, whether or not they could be taken

    def take(self, tokens: Sequence[int], draft_key: str | None) -> list[int]:
        """Pages of the longest usable prefix, shared for the caller; at least one token is always left to run."""
        node, pages = self._root, []
        self._clock += 1
        for chunk in self._chunks(tokens, (len(tokens) - 1) // self._page_tokens):
            child = node.children.get(chunk)
            found = child.usable(draft_key) if child is not None else None
            if child is None or found is None:
                break
            if self._table.epoch(found.page) != found.epoch or not self._table.holders(found.page):
                # the page was handed out to somebody else: forget it and let the prompt be computed again
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
                child = node.children[chunk] = _Node(node, chunk)
                self.nodes.add(child)
            known, own = (child.usable(draft_key) if child.pages else None), child.pages.get(draft_key)
            if known is None or (known is own and self._resumable(page) and not self._resumable(own.page)):
                self._table.share([page])
                self.size += 1
                known = child.pages[draft_key] = _Page(page, self._table.epoch(page), self._clock)
                if own is not None:
                    # the same tokens, now with a state: the richer page replaces the poorer one
                    self._release(own)
                if draft_key is not None and None in child.pages:
                    # likewise with draft context
                    self._release(child.pages.pop(None))
            known.last_used = self._clock
            node = child

    def _resumable(self, page: int) -> bool:
        """Whether a sequence can go on behind a page; attention needs nothing but the pages."""
        return self._states is None or self._states.has(page_key(self._table, page))

    def evict(self, pages_wanted: int) -> int:
        """Frees up to this many pages nobody else holds, oldest leaves first; returns how many came free."""
        if pages_wanted <= 0:
            return 0
        order = itertools.count()  # equally old leaves are never compared themselves
        leaves = [(found.last_used, next(order), node, key) for node in self.nodes for key, found in self._free(node)]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < pages_wanted:
            _, _, node, key = heapq.heappop(leaves)
            if node not in self.nodes or not any(key == free for free, _ in self._free(node)):
                continue  # an entry that is out of date: something leans on the page by now, or it is gone
            self._forget_page(node, key)
            freed += 1
            # what the page leant on may be a leaf now, and older than the leaves still there
            for near in (node, node.parent):
                if near in self.nodes:
                    for free, found in self._free(near):
                        heapq.heappush(leaves, (found.last_used, next(order), near, free))
        return freed

    def _free(self, node: _Node) -> list[tuple[str | None, _Page]]:
        """Pages of a node that could go at once, by their draft keys."""
        return [
            (key, found)
            for key, found in node.pages.items()
            if self._table.holders(found.page) == 1 and _is_leaf(node, key)
        ]

    def evictable(self, enough: int | None = None) -> int:
        """Pages eviction could free: one counts when it and all that lean on it are held by the cache alone.

        Counting may stop at `enough`: the whole of a large cache is not walked through to find a few pages.
        """
        stuck: set[int] = set()  # pages that stay
        kept: set[int] = set()  # nodes that keep a page
        count = 0
        for top in self._root.children.values():
            for node in _leaves_first(top):
                if enough is not None and count >= enough:
                    return count
                count += self._removable(node, stuck, kept)
        return count

    def held(self) -> list[int]:
        return [found.page for node in self.nodes for found in node.pages.values()]

    def forget(self, draft_key: str) -> None:
        """Lets go of every page that carries this draft context: nobody makes or reads it any more."""
        for node in [node for node in self.nodes if draft_key in node.pages]:
            if node in self.nodes:  # it may have gone with a branch
                self._forget_page(node, draft_key)

    def clear(self) -> None:
        for child in list(self._root.children.values()):
            self._forget_branch(child)

    def _chunks(self, tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
        size = self._page_tokens
        return [tuple(tokens[i * size : (i + 1) * size]) for i in range(count)]

    def _forget_page(self, node: _Node, draft_key: str | None) -> None:
        """A node that has no page left goes, and with it whatever stands behind it."""
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

    def _removable(self, node: _Node, stuck: set[int], kept: set[int]) -> int:
        """How many pages of a node could go, once that is known of its children."""
        children = node.children.values()
        staying = [
            found.page
            for key, found in node.pages.items()
            if self._table.holders(found.page) > 1
            or any(key in child.pages and child.pages[key].page in stuck for child in children)
        ]
        stuck.update(staying)
        # something has to lead to a node that stays
        leading = bool(staying) or any(id(child) in kept for child in children)
        if leading:
            kept.add(id(node))
        return len(node.pages) - max(len(staying), int(leading))


def _leaves_first(top: _Node) -> Iterator[_Node]:
    """The nodes of a branch, each behind its children; a branch can be deeper than Python's stack."""
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
    """Whether no page of the tree leans on this one: of the same drafter, or any if the node has no other page."""
    if len(node.pages) == 1:
        return not node.children
    return not any(draft_key in child.pages for child in node.children.values())
