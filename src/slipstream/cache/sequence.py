"""SequenceState owns the tokens and pages of one sequence; they change together or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.cache.pages import OutOfPages, PageTable, Place
from slipstream.cache.recurrent import RecurrentState, StatePool, page_key
from slipstream.errors import IntegrityError
from slipstream.types import BASE_VARIANT


class PageMemory(Protocol):
    """What a sequence may do with the tensors behind its pages."""

    @property
    def states(self) -> StatePool | None: ...
    def copy_page(self, source: int, destination: int) -> None: ...
    def move_rows(self, sources: Sequence[Place], destinations: Sequence[Place]) -> None: ...
    def clear_rows(self, places: Sequence[Place]) -> None: ...
    def clear_pages(self, pages: Sequence[int]) -> None: ...


class Taps(Protocol):
    """Hidden states of the target that the drafter reads, one row per position."""

    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice, /) -> Taps: ...


class SequenceState:
    """The tokens of a sequence and the pages that hold their target keys and draft context.

    `length` positions have been through the target. Tokens beyond them are the rest of the prompt or the anchor.
    `draft_length` positions have draft context: in the pages or, while the sequence decodes plainly, as taps that are
    projected later. In a drafting sequence both lengths are equal at all times. `variant` names the drafter that wrote
    its draft context.
    """

    def __init__(
        self, table: PageTable, page_tokens: int, memory: PageMemory, drafting: bool, variant: str = BASE_VARIANT
    ) -> None:
        self._table = table
        self._memory = memory
        self.page_tokens = page_tokens
        self.drafting = drafting
        self.variant = variant
        self.tokens: list[int] = []
        self.pages: list[int] = []
        self.length = 0
        self.draft_length = 0
        self.waiting: list[tuple[int, Taps]] = []  # stretches without written context: first position, and taps
        self.spoiled = False  # whether the pages may hold NaN, so that they must be cleared before another use
        self.recurrent = RecurrentState(memory.states) if memory.states is not None else None
        # Position up to which an earlier prompt was the same. The next prompt may differ there too, so a recurrent
        # state is kept there.
        self.branch = 0

    @property
    def capacity(self) -> int:
        return len(self.pages) * self.page_tokens

    def start(self, tokens: Sequence[int], cached_pages: Sequence[int]) -> None:
        """Begins with a prompt and the pages of a cached prefix.

        The pages are already shared with this sequence, and they bring their draft context.
        """
        if self.tokens or self.pages:
            raise IntegrityError("a sequence is started twice")
        if self.recurrent is not None:
            key = page_key(self._table, cached_pages[-1]) if cached_pages else None
            self.recurrent.start(key, len(cached_pages) * self.page_tokens)
        self.tokens = list(tokens)
        self.pages = list(cached_pages)
        self.length = len(cached_pages) * self.page_tokens
        self.draft_length = self.length if self.drafting else 0

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions in all. If it raises OutOfPages, the sequence is unchanged."""
        missing = -(-positions // self.page_tokens) - len(self.pages)
        if missing > 0:
            self.pages += self._table.allocate(missing, self.pages[-1] if self.pages else None)

    def place(self, position: int) -> Place:
        """Returns the page id and offset of a position."""
        return self.pages[position // self.page_tokens], position % self.page_tokens

    def places(self, start: int, count: int) -> tuple[list[int], list[int]]:
        """Returns the page ids and the offsets of `count` positions from `start` on."""
        pages: list[int] = []
        offsets: list[int] = []
        while count:
            page, offset = divmod(start, self.page_tokens)
            here = min(count, self.page_tokens - offset)
            pages += [self.pages[page]] * here
            offsets += range(offset, offset + here)
            start, count = start + here, count - here
        return pages, offsets

    def commit(self, rows: Sequence[int], new_tokens: Sequence[int], context_rows: int) -> None:
        """Keeps `rows` of the rows that the target has just run, and appends tokens that have not run yet.

        Row i was stored at position `length` + i; the kept rows of a tree are moved to consecutive positions.
        `context_rows` is how many of them have draft context.
        """
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        if moved:
            self._memory.move_rows(
                [self.place(self.length + row) for row, _ in moved], [self.place(self.length + to) for _, to in moved]
            )
        if self.recurrent is not None:
            self._keep_checkpoints(self.recurrent, rows)
            self.recurrent.commit(rows)
        self.length += len(rows)
        self.draft_length += context_rows
        self.tokens += new_tokens
        self.check()

    @property
    def slots(self) -> tuple[int, int] | None:
        """The slot of the recurrent state and the slot for the next one; None if there is no recurrent state."""
        recurrent = self.recurrent
        return (recurrent.slot, recurrent.spare_slot) if recurrent is not None and recurrent.slot is not None else None

    def land(self, rows: int) -> None:
        """Notes that a step on a device has kept this many rows and advanced the recurrent state, if any."""
        if self.recurrent is not None:
            self.recurrent.land(rows)

    def checkpoint_rows(self, rows: int) -> list[int]:
        """Returns the rows after which the recurrent state is worth keeping, if all of the next `rows` rows stay.

        Each of them ends a page: a page at the pool's stride, the last full page, or the page that ends at `branch`.
        """
        size, stride = self.page_tokens, self.recurrent.pool.stride if self.recurrent is not None else 0
        full, after = self.length // size, (self.length + rows) // size
        if not stride:
            return []
        return [
            page * size - self.length - 1
            for page in range(full + 1, after + 1)
            if page % stride == 0 or page == after or page * size == self.branch
        ]

    def _keep_checkpoints(self, recurrent: RecurrentState, rows: Sequence[int]) -> None:
        """Keeps states at the ends of pages.

        The newest one replaces the one before, unless the page before is at the stride, ends at `branch` or is shared.
        """
        pool, full = recurrent.pool, self.length // self.page_tokens
        ends = self.checkpoint_rows(len(rows))
        for end in ends:
            page = self.pages[(self.length + end) // self.page_tokens]
            pool.remember(page_key(self._table, page), recurrent.after(rows[: end + 1]))
        newest = page_key(self._table, self.pages[(self.length + ends[-1]) // self.page_tokens]) if ends else None
        if newest and pool.has(newest) and full % pool.stride and full * self.page_tokens != self.branch:
            page = self.pages[full - 1]
            if self._table.holders(page) == 1:
                pool.forget([page_key(self._table, page)])

    @property
    def waiting_rows(self) -> int:
        """How many positions have waiting taps: all from the first of them to the end of the draft context."""
        return self.draft_length - self.waiting[0][0] if self.waiting else 0

    def clear_ahead(self, rows: int) -> None:
        """Zeroes the slots of rows that ran but were not kept: they may hold NaN, which a mask does not stop."""
        self._memory.clear_rows([self.place(self.length + row) for row in range(rows)])

    def truncate(self, length: int) -> None:
        """Goes back to `length` positions: tokens, target keys and draft context, and releases unused pages.

        If a page that others share must be copied and none is free, OutOfPages is raised and the sequence is unchanged.
        A recurrent sequence goes back to the nearest kept state; the tokens after that state are computed again.
        """
        if not 0 <= length <= self.length:
            raise IntegrityError(f"cannot truncate a sequence of {self.length} positions to {length}")
        tokens = length
        if self.recurrent is not None and length < self.length:
            length = self._restart(self.recurrent, length)
        keep = -(-length // self.page_tokens)
        if length % self.page_tokens and self._table.holders(self.pages[keep - 1]) > 1:
            # the page will be written again while another holder still reads it
            own = self._table.allocate(1)[0]
            self._memory.copy_page(self.pages[keep - 1], own)
            self._table.release([self.pages[keep - 1]])
            self.pages[keep - 1] = own
        self._release_pages(self.pages[keep:])
        del self.pages[keep:]
        del self.tokens[tokens:]
        self.waiting = [(start, taps[: length - start]) for start, taps in self.waiting if start < length]
        self.length = length
        self.draft_length = length if self.drafting else 0

    def _restart(self, recurrent: RecurrentState, length: int) -> int:
        """Goes back to the last kept state at or before `length`; returns the position of that state."""
        keys = [page_key(self._table, page) for page in self.pages[: length // self.page_tokens]]
        while keys and not recurrent.pool.has(keys[-1]):
            keys.pop()
        recurrent.release()
        recurrent.start(keys[-1] if keys else None, len(keys) * self.page_tokens)
        return recurrent.length

    def fork(self) -> SequenceState:
        """Returns an independent copy: full pages are shared, and the page still being written is copied."""
        if self.recurrent is not None and not self.recurrent.pool.available:
            raise OutOfPages("no slot for a recurrent state is free")
        twin = SequenceState(self._table, self.page_tokens, self._memory, self.drafting, self.variant)
        full = self.length // self.page_tokens
        partial = self.length % self.page_tokens > 0
        fresh = self._table.allocate(1) if partial else []
        self._table.share(self.pages[:full])
        twin.pages = self.pages[:full] + fresh
        if partial:
            self._memory.copy_page(self.pages[full], fresh[0])
        if self.recurrent is not None:
            twin.recurrent = self.recurrent.fork()
        twin.tokens = list(self.tokens)
        twin.waiting = list(self.waiting)
        twin.length, twin.draft_length, twin.spoiled = self.length, self.draft_length, self.spoiled
        return twin

    def release(self) -> None:
        if self.spoiled:
            self._memory.clear_pages([page for page in self.pages if self._table.holders(page) == 1])
            self.spoiled = False
        if self.recurrent is not None:
            self.recurrent.release()
        self._release_pages(self.pages)
        self.pages = []
        self.tokens = []
        self.waiting = []
        self.length = self.draft_length = self.branch = 0

    def _release_pages(self, pages: Sequence[int]) -> None:
        self._table.release(pages)
        if self.recurrent is not None:
            self.recurrent.pool.forget_free(self._table, pages)

    def check(self) -> None:
        """Checks that all parts stand at the same position."""
        if self.drafting and self.draft_length != self.length:
            raise IntegrityError(f"draft context stands at {self.draft_length}, the target at {self.length}")
        if self.waiting and self.waiting[-1][0] + len(self.waiting[-1][1]) > self.draft_length:
            raise IntegrityError(f"taps wait beyond the draft context of {self.draft_length} positions")
        if self.recurrent is not None and self.recurrent.length != self.length:
            raise IntegrityError(f"the recurrent state stands at {self.recurrent.length}, the target at {self.length}")
        if self.length > len(self.tokens):
            raise IntegrityError(f"{self.length} positions computed for {len(self.tokens)} tokens")
        if self.length > self.capacity:
            raise IntegrityError(f"{self.length} positions in room for {self.capacity}")
