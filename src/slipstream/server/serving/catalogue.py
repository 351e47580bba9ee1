"""The names a server offers, the models in memory behind them, and the memory that these models hold."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from slipstream.errors import ConfigError
from slipstream.server.serving.model_entries import Entry, NoMemoryNowError, NoResidentModelError, State, unknown_model
from slipstream.server.serving.model_files import ANY, ModelSpec
from slipstream.server.serving.residency import Resident, available_bytes, in_mib

# If `any` could mean several models, the router prefers the one that can answer soonest.
_ANY_ORDER: dict[State, int] = {"ready": 0, "loading": 1, "sleeping": 2}


class Catalogue:
    """Entries by name, in the order in which clients see them, and the residents whose name is already gone.

    `budget` bounds the weights and page pools of all models together; None leaves the decision to the free memory of
    the machine. Everything here belongs to the event loop's thread, except `quiet`.
    """

    def __init__(self, specs: Sequence[ModelSpec]) -> None:
        self.budget: int | None = None
        self.leaving: list[Resident] = []  # no new request gets these; each is unloaded when its last request ends
        self._entries: dict[str, Entry] = {}
        self._turns = itertools.count(1)
        for spec in specs:
            if spec.name in self._entries:
                raise ConfigError(f"two models are called '{spec.name}'", "give each its own name")
            self._entries[spec.name] = Entry(spec, int(time.time()))

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def has(self, entry: Entry) -> bool:
        """Whether the entry is still the one that its name stands for."""
        return self._entries.get(entry.spec.name) is entry

    def find(self, name: str) -> Entry:
        """What a name stands for; `any` is the model that was used last."""
        if name != ANY:
            if name not in self._entries:
                raise unknown_model(name, self.names)
            return self._entries[name]
        resident = [entry for entry in self if entry.state in _ANY_ORDER]
        if not resident:
            raise NoResidentModelError(
                "no model is resident, so 'any' means none", f"name one of: {', '.join(self._entries)}"
            )
        return min(resident, key=lambda entry: (_ANY_ORDER[entry.state], -entry.last_turn))

    def note_use(self, entry: Entry) -> None:
        entry.last_used_ms = int(time.time() * 1000)
        entry.last_turn = next(self._turns)

    def replace(self, specs: Sequence[ModelSpec]) -> tuple[list[Entry], list[Entry]]:
        """Offers exactly these names, in this order; returns the entries that are new and those that were removed."""
        before = self._entries
        self._entries = {spec.name: before.get(spec.name) or Entry(spec, int(time.time())) for spec in specs}
        added = [entry for name, entry in self._entries.items() if name not in before]
        return added, [entry for name, entry in before.items() if name not in self._entries]

    def in_memory(self) -> list[Resident]:
        return [entry.resident for entry in self if entry.resident is not None] + self.leaving

    def residents(self) -> list[Resident]:
        """Every model in memory that is not being unloaded, also one without a name that only finishes its requests."""
        return [resident for resident in self.in_memory() if not resident.unloading]

    def idle(self) -> list[Entry]:
        """Entries whose model is in memory and has neither users nor requests that wait for it."""
        return [entry for entry in self if entry.resident is not None and not entry.busy]

    def fits(self, needed: int) -> bool:
        if self.budget is not None:
            return self.held() + needed <= self.budget
        free = available_bytes()
        return free is None or needed <= free

    def held(self) -> int:
        """Bytes of every model that is in memory, being loaded or being unloaded."""
        return sum(entry.reserved for entry in self) + sum(resident.memory_bytes for resident in self.in_memory())

    def never_fits(self, needed: int) -> ConfigError:
        limit = self.budget if self.budget is not None else available_bytes() or 0
        return ConfigError(f"it needs {in_mib(needed)}, there are {in_mib(limit)}", "lower its cache_tokens")

    def no_memory(self, entry: Entry, needed: int, retry_after_s: float) -> NoMemoryNowError:
        holders = [
            f"'{resident.name}' ({in_mib(resident.memory_bytes)}, {resident.users} running)"
            for resident in self.residents()
        ]
        holders += [f"'{other.spec.name}' ({in_mib(other.reserved)}, loading)" for other in self if other.reserved]
        limit = "" if self.budget is None else f" of a budget of {in_mib(self.budget)}"
        return NoMemoryNowError(
            f"model '{entry.spec.name}' needs {in_mib(needed)}{limit}, which {', '.join(holders)} hold",
            "try again when their requests are over",
            retry_after_s=retry_after_s,
        )

    def quiet(self, entry: Entry) -> bool:
        """Whether only the load of this entry changes the process's memory; the thread of the load calls it."""
        others = [other for other in self if other is not entry]
        return not self.leaving and not any(other.busy or other.reserved for other in others)
