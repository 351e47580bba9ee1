"""Recurrent state as a cache: a slot for every running sequence, and checkpoints beside full pages. It holds no
tensors.

A page id and its epoch name the stretch of tokens after which a checkpoint stands. A page that is allocated anew
therefore has no checkpoint, and a cached prefix can continue after a page only if a state was kept there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from slipstream.cache.pages import OutOfPages, PageTable
from slipstream.errors import IntegrityError

PageKey = tuple[int, int]  # page id and epoch
# A recurrent state: the slot in which it already lies, or the form that the memory's own forward produces and its
# `write` stores
States = Any


class StateMemory(Protocol):
    """The tensors behind the slots."""

    def copy(self, source: int, destination: int) -> None: ...
    def clear(self, slot: int) -> None: ...
    def write(self, slot: int, states: States) -> None: ...


class TriedRows(Protocol):
    """Rows that have been through the target and may or may not be kept."""

    def after(self, item: int, path: Sequence[int]) -> States | None: ...


class StatesInSlots:
    """Rows of a forward that has written states itself; `slots` maps a number of kept rows to the state after them."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        self._slots = slots

    def after(self, item: int, path: Sequence[int]) -> int | None:
        return self._slots.get(len(path))


def page_key(table: PageTable, page: int) -> PageKey:
    return page, table.epoch(page)


class StatePool:
    """Slots for sequences and checkpoints. A checkpoint gives up its slot to a sequence or to a newer checkpoint."""

    def __init__(self, slots: int, memory: StateMemory, stride: int, per_sequence: int = 1) -> None:
        """`per_sequence` is 2 if a forward writes the new state beside the one it reads."""
        self.memory = memory
        self.per_sequence = per_sequence
        self.stride = stride  # pages between checkpoints; 0 means that none are kept
        self._table = PageTable(slots)
        self._checkpoints: OrderedDict[PageKey, int] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """How many more sequences could get their slots."""
        return self._room // self.per_sequence

    @property
    def _room(self) -> int:
        return self._table.free + len(self._checkpoints)

    @property
    def checkpoints(self) -> list[PageKey]:
        return list(self._checkpoints)

    def allocate(self) -> int:
        """Returns a slot with arbitrary contents; the oldest checkpoint is dropped if no slot is free."""
        if not self._table.free:
            if not self._checkpoints:
                raise OutOfPages("no slot for a recurrent state is free")
            self._table.release([self._checkpoints.popitem(last=False)[1]])
        return self._table.allocate(1)[0]

    def lend(self) -> int | None:
        """Returns a slot that the caller releases soon, or None if sequences hold all of them."""
        return self.allocate() if self._room else None

    def release(self, slot: int) -> None:
        self._table.release([slot])

    def has(self, key: PageKey) -> bool:
        return key in self._checkpoints

    def remember(self, key: PageKey, states: States | None) -> None:
        """Keeps a state after a page, unless the state is unknown or sequences hold every slot."""
        if states is not None and key not in self._checkpoints and self._room:
            slot = self.allocate()
            self.store(slot, states)
            self._checkpoints[key] = slot

    def store(self, slot: int, states: States) -> None:
        if isinstance(states, int):
            self.memory.copy(states, slot)
        else:
            self.memory.write(slot, states)

    def slot_from(self, key: PageKey | None) -> int:
        """Returns a new slot with the state after a page or, without a page, with the state before any token."""
        if key is None:
            slot = self.allocate()
            self.memory.clear(slot)
            return slot
        found = self._checkpoints.get(key)
        if found is None:
            raise IntegrityError(f"no recurrent state was kept after page {key[0]}")
        if self._room == 1:  # no other slot is left, so the sequence takes the checkpoint's own slot
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
        """Drops the states that were kept after pages which have no holder any more."""
        self.forget(page_key(table, page) for page in pages if not table.holders(page))

    def check(self, held: Iterable[int], pages: PageTable) -> None:
        """Checks that every slot has a known holder and that every checkpoint's page has not been allocated anew."""
        self._table.check([*held, *self._checkpoints.values()])
        for page, epoch in self._checkpoints:
            if pages.epoch(page) != epoch or not pages.holders(page):
                raise IntegrityError(f"a recurrent state is kept after page {page}, which is not the same any more")


class RecurrentState:
    """A sequence's recurrent state: the slot with the state after its last position, and the rows being tried."""

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        self.slot: int | None = None
        self._spare: int | None = None  # the slot into which a forward may write the next state
        self.length = 0
        self._tried: tuple[TriedRows, int] | None = None  # the forward whose outcome is open, and this sequence's index
        self._lent: Sequence[int] = ()  # slots into which that forward has written states
        # whether the state after the kept rows is unknown; it may be so only for a sequence that ends, which can keep
        # fewer rows than the forward has advanced the state by
        self._lost = False

    @property
    def spare_slot(self) -> int:
        if self._spare is None:
            raise IntegrityError("a sequence has no spare slot, although forwards write states")
        return self._spare

    @property
    def held(self) -> list[int]:
        """Every slot that this sequence holds."""
        return [slot for slot in (self.slot, self._spare, *self._lent) if slot is not None]

    def start(self, key: PageKey | None, length: int) -> None:
        """Begins after a page, or before the first token if there is no page."""
        self.slot = self.pool.slot_from(key)
        self._spare = self._second_slot()
        self.length = length

    def _second_slot(self) -> int | None:
        return self.pool.allocate() if self.pool.per_sequence > 1 else None

    def try_rows(self, tried: TriedRows, item: int, lent: Sequence[int] = ()) -> None:
        """Notes that rows go through the target. The forward also fills the slots in `lent`; `commit` releases them."""
        if self._lost:
            raise IntegrityError("a sequence continues after rows whose recurrent state is not known")
        self._give_back()
        self._tried, self._lent = (tried, item), lent

    def land(self, rows: int) -> None:
        """Notes that a forward has written the state after this many rows into the spare slot, and no other state."""
        self.try_rows(StatesInSlots({rows: self.spare_slot}), 0)

    def after(self, rows: Sequence[int]) -> States | None:
        """Returns the state after some of the rows being tried, or None if it is not known."""
        if self._tried is None:
            raise IntegrityError("rows are kept that no forward has run")
        tried, item = self._tried
        return tried.after(item, rows)

    def commit(self, rows: Sequence[int]) -> None:
        if rows and self.slot is not None:
            states = self.after(rows)
            self._lost = states is None
            if isinstance(states, int) and states == self._spare:
                self.slot, self._spare = self._spare, self.slot
            elif states is not None:
                self.pool.store(self.slot, states)
        self._give_back()
        self.length += len(rows)

    def _give_back(self) -> None:
        for slot in self._lent:
            self.pool.release(slot)
        self._tried, self._lent = None, ()

    def fork(self) -> RecurrentState:
        twin = RecurrentState(self.pool)
        if self.slot is not None:
            twin.slot = self.pool.allocate()
            twin._spare = twin._second_slot()
            self.pool.memory.copy(self.slot, twin.slot)
        twin.length, twin._lost = self.length, self._lost
        return twin

    def release(self) -> None:
        for slot in self.held:
            self.pool.release(slot)
        self.slot = self._spare = self._tried = None
        self.length, self._lent, self._lost = 0, (), False
