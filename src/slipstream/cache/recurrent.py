"""Recurrent state as a cache: a slot for every running sequence, checkpoints that stand beside full pages; no tensors.

A page id with its epoch names the stretch of tokens a checkpoint stands behind, so a page that is handed out anew has
none, and a cached prefix can go on from a page's end only where its state was kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from slipstream.cache.pages import OutOfPages, PageTable
from slipstream.errors import IntegrityError

PageKey = tuple[int, int]  # page id and epoch
LayerStates = Iterable[tuple[Any, Any]]  # layer by layer a state's two tensors


class StateMemory(Protocol):
    """The memory behind the slots."""

    def copy(self, source: int, destination: int) -> None: ...
    def clear(self, slot: int) -> None: ...
    def write(self, slot: int, states: LayerStates) -> None: ...


class TriedRows(Protocol):
    """Rows that have been through the target and may be kept or not."""

    def after(self, item: int, path: Sequence[int]) -> LayerStates: ...


def page_key(table: PageTable, page: int) -> PageKey:
    return page, table.epoch(page)


class StatePool:
    """Slots that sequences and checkpoints hold; checkpoints give way to sequences and to newer ones."""

    def __init__(self, slots: int, memory: StateMemory, stride: int) -> None:
        self.memory = memory
        self.stride = stride  # pages between checkpoints; 0: none are kept
        self._table = PageTable(slots)
        self._checkpoints: OrderedDict[PageKey, int] = OrderedDict()  # the least recently used first

    @property
    def available(self) -> int:
        """Slots a sequence could get."""
        return self._table.free + len(self._checkpoints)

    @property
    def checkpoints(self) -> list[PageKey]:
        return list(self._checkpoints)

    def allocate(self) -> int:
        """A slot with whatever it held before; the oldest checkpoint makes room."""
        if not self._table.free:
            if not self._checkpoints:
                raise OutOfPages("no slot for a recurrent state is free")
            self._table.release([self._checkpoints.popitem(last=False)[1]])
        return self._table.allocate(1)[0]

    def release(self, slot: int) -> None:
        self._table.release([slot])

    def has(self, key: PageKey) -> bool:
        return key in self._checkpoints

    def remember(self, key: PageKey, states: LayerStates) -> None:
        """Keeps a state behind a page, unless sequences need every slot."""
        if key not in self._checkpoints and self.available:
            slot = self.allocate()
            self.memory.write(slot, states)
            self._checkpoints[key] = slot

    def slot_from(self, key: PageKey | None) -> int:
        """A slot of one's own that holds the state behind a page; without a page, the state before any token."""
        if key is None:
            slot = self.allocate()
            self.memory.clear(slot)
            return slot
        found = self._checkpoints.get(key)
        if found is None:
            raise IntegrityError(f"no recurrent state was kept behind page {key[0]}")
        if self.available == 1:
            return self._checkpoints.pop(key)
        self._checkpoints.move_to_end(key)
        slot = self.allocate()
        self.memory.copy(found, slot)
        return slot

    def forget(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            slot = self._checkpoints.pop(key, None)
            if slot is not None:
                self._table.release([slot])

    def forget_free(self, table: PageTable, pages: Iterable[int]) -> None:
        """Drops what was kept behind pages that nobody holds any more."""
        self.forget(page_key(table, page) for page in pages if not table.holders(page))

    def check(self, held: Iterable[int], pages: PageTable) -> None:
        """Every slot is held by one who knows it, and every checkpoint belongs to a page that is still the same."""
        self._table.check([*held, *self._checkpoints.values()])
        for page, epoch in self._checkpoints:
            if pages.epoch(page) != epoch or not pages.holders(page):
                raise IntegrityError(f"a recurrent state is kept behind page {page}, which is not the same any more")


class RecurrentState:
    """A sequence's place in the recurrence: the state behind its last position, and the rows that are being tried."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.slot: int | None = None
        self.length = 0
        self._tried: tuple[TriedRows, int] | None = None  # the forward whose outcome is open, and its part in it

    def start(self, key: PageKey | None, length: int) -> None:
        """Begins behind a page, or before the first token."""
        self.slot = self.pool.slot_from(key)
        self.length = length

    def restart(self, key: PageKey | None, length: int) -> None:
        """Goes back to the state behind a page of its own."""
        self.release()
        self.start(key, length)

    def try_rows(self, tried: TriedRows, item: int) -> None:
        self._tried = tried, item

    def after(self, rows: Sequence[int]) -> LayerStates:
        """The state behind some of the rows that are being tried."""
        if self._tried is None:
            raise IntegrityError("rows are kept that no forward has run")
        tried, item = self._tried
        return tried.after(item, rows)

    def commit(self, rows: Sequence[int]) -> None:
        if rows and self.slot is not None:
            self.pool.memory.write(self.slot, self.after(rows))
        self._tried = None
        self.length += len(rows)

    def fork(self) -> RecurrentState:
        twin = RecurrentState(self.pool)
        if self.slot is not None:
            twin.slot = self.pool.allocate()
            self.pool.memory.copy(self.slot, twin.slot)
        twin.length = self.length
        return twin

    def release(self) -> None:
        if self.slot is not None:
            self.pool.release(self.slot)
        self.slot, self.length, self._tried = None, 0, None
