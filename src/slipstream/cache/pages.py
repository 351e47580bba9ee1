"""Page bookkeeping: which pages are free, how often each one is held, and whether a remembered page is still the same.

A page id names one stretch of tokens in every pool at once (target keys and values, draft context). A page can
therefore never bring the target's keys without the draft context of the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.errors import IntegrityError

Place = tuple[int, int]  # page id and offset


class OutOfPages(Exception):
    """There are not enough free pages; the caller evicts pages or waits."""


class PageTable:
    """Reference counts over a fixed number of pages."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self.releases = 0  # how many times pages have been released so far
        self._holders = [0] * pages
        self._epochs = [0] * pages
        self._used = bytearray(pages)  # one byte per page, so that a substring search finds a free stretch

    @property
    def free(self) -> int:
        return self._used.count(0)

    def holders(self, page: int) -> int:
        return self._holders[page]

    def epoch(self, page: int) -> int:
        """The page's epoch changes whenever the page is allocated; a remembered page is valid only at its epoch."""
        return self._epochs[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` pages, neighbours if possible, because attention reads neighbouring pages in one call.

        The pages directly after page `after` are taken if they are free.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages wanted, {self.free} free")
        stretch = bytes(count)
        follows = after is not None and self._used.startswith(stretch, after + 1)
        start = after + 1 if after is not None and follows else self._used.find(stretch)
        if start >= 0:
            chosen = list(range(start, start + count))
        else:
            chosen = [page for page in range(self.total) if not self._used[page]][:count]
        for page in chosen:
            self._used[page] = 1
            self._holders[page] = 1
            self._epochs[page] += 1
        return chosen

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._used[page]:
                raise IntegrityError(f"page {page} is shared after it was freed")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        self.releases += 1
        for page in pages:
            if self._holders[page] <= 0:
                raise IntegrityError(f"page {page} is released twice")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._used[page] = 0

    def check(self, held: Iterable[int]) -> None:
        """Checks that the pages named by all holders, with repeats, are exactly the pages in use."""
        counts = [0] * self.total
        for page in held:
            if not 0 <= page < self.total:
                raise IntegrityError(f"page {page} does not exist")
            counts[page] += 1
        for page in range(self.total):
            if counts[page] != self._holders[page] or bool(counts[page]) != bool(self._used[page]):
                raise IntegrityError(
                    f"page {page} has {self._holders[page]} holders on record and {counts[page]} in fact"
                )
