"""Decides who runs: the line and its slots, admission by pages, turns, pauses, prefill on a fixed grid; no tensors.

Larger priorities go first, and within one who came first. Slots are shared only where that is sensible: while nobody
waits everybody keeps theirs, and when somebody does, a sequence that has had its quantum hands its slot to the first
in line that can really start, of its own priority or a higher one (to a higher one at once). It keeps its pages and
goes to the end of its line, so that it goes on later without computing anything twice. Waiting raises the priority a
request counts with, so that a steady stream of larger ones cannot keep it waiting for ever.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from slipstream.cache.pages import PageTable
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.recurrent import StatePool
from slipstream.cache.sequence import SequenceState
from slipstream.errors import BusyError, RequestError, StaleEpochError
from slipstream.types import Request

QUANTUM_TOKENS = 64
# Waiting this long counts as one priority more. Answers take seconds, so a larger priority still goes first in a busy
# hour; the smallest priority (-100) passes the largest (100) after 33 minutes.
AGEING_S = 10.0
# Steps with prompts and steps without share the time 1 to 3. At 1 to 2, a client that sends short requests without a
# pause makes its neighbours 1.9 times as slow and sometimes more than twice; at 1 to 3, 1.7 times.
_DECODING_SHARE = 3
_ROWS_PER_TOKEN = 8  # prefilled rows that take about as long as one decoded token

Phase = Literal["waiting", "prefill", "decode", "yielded", "paused", "paused-evicted"]


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through the scheduler."""

    request: Request
    state: SequenceState
    positions: int  # room the sequence may ever need, drafted rows included
    draft_key: str | None
    max_tokens: int
    generated: int = 0
    cached_tokens: int = 0
    cancelled: bool = False
    epoch: int = 0  # rises with every pause; whoever resumes must name the current one
    ready: Callable[[], bool] = lambda: True  # whether a token could be chosen for it now
    where: Literal["waiting", "running", "paused"] = "waiting"
    place: int = 0  # in the line, by arrival
    since: float = 0.0  # when it lined up: from then on it ages
    level: int = 0  # its priority when it got its slot, raised by what it had waited: only larger ones take it away
    turn: int = 0  # the order in which prompts had their last chunk, or got their slots
    chunk_at: float = 0.0  # when that was: from then on a prompt ages
    kept_tokens: tuple[int, ...] = ()  # what a sequence that lost its pages is computed from again
    _seated_at: tuple[int, int] = (0, 0)  # generated tokens and computed positions when it got its slot

    @property
    def prefilling(self) -> bool:
        # behind a first token only the anchor has still to run, unless the sequence lost its pages
        return self.generated == 0 or self.state.length < len(self.state.tokens) - 1

    @property
    def prefill_end(self) -> int:
        """Positions to compute before decoding; the last generated token is the anchor and runs with its step."""
        return len(self.state.tokens) - (self.generated > 0)

    @property
    def room(self) -> int:
        """Tokens that may still be emitted; drafting deeper than that would be wasted."""
        return self.max_tokens - self.generated

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def order(self) -> tuple[float, int]:
        """Where it stands in the line: a priority is worth as much as having come that much earlier."""
        return self.since - AGEING_S * self.priority, self.place

    def aged(self, now: float, since: float | None = None) -> int:
        """Its priority, raised by the time it has waited, for a slot or since another moment."""
        return self.priority + int((now - (self.since if since is None else since)) / AGEING_S)

    @property
    def phase(self) -> Phase:
        if self.where == "running":
            return "prefill" if self.prefilling else "decode"
        if self.where == "paused":
            return "paused-evicted" if self.kept_tokens else "paused"
        return "yielded" if self.state.pages or self.kept_tokens else "waiting"

    def sit_down(self, turn: int, now: float) -> None:
        self.where, self.turn, self.level, self.chunk_at = "running", turn, self.aged(now), now
        self._seated_at = (self.generated, self.state.length)

    @property
    def served(self) -> int:
        """What it had of its slot so far, in decoded tokens or prefilled rows worth as many."""
        tokens = self.generated - self._seated_at[0]
        rows = self.state.length - self._seated_at[1] - tokens
        return tokens + max(0, rows) // _ROWS_PER_TOKEN


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    ticket: Ticket
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether a first token comes of it; one that is computed again has its tokens already."""
        return self.stop == len(self.ticket.state.tokens)


@dataclass(slots=True)
class StepPlan:
    """The rows of one target forward."""

    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Ticket] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Scheduler:
    """A sequence is admitted only when its pages for the whole way are there, so whoever runs can always finish."""

    def __init__(
        self,
        table: PageTable,
        prefix: PrefixCache | None,
        page_tokens: int,
        max_sequences: int,
        max_waiting: int,
        prefill_chunk: int,
        step_rows: int,
        quantum: int = QUANTUM_TOKENS,
        states: StatePool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._prefix = prefix
        self._page_tokens = page_tokens
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._chunk = prefill_chunk
        self._step_rows = step_rows
        self._quantum = quantum
        self._states = states
        self._clock = clock
        self._owed_s = 0.0  # how long decoding goes on alone before the next prompt
        self._pauses = 0
        self._stuck: tuple[Ticket, tuple[int, ...]] | None = None  # what could not start, and from which supply
        self._places = itertools.count()
        self._turns = itertools.count()
        self.waiting: list[Ticket] = []  # in the order they are served; a yielded one among them holds its pages
        self.running: list[Ticket] = []
        self.paused: list[Ticket] = []  # who was paused first comes first

    @property
    def busy(self) -> bool:
        """Whether a step would do anything; paused sequences alone give it nothing to do."""
        return bool(self.running or self.waiting) or any(ticket.cancelled for ticket in self.paused)

    @property
    def newcomers(self) -> int:
        """Requests in line that have not run yet; who was let in once and paused comes back without being counted."""
        return sum(ticket.phase == "waiting" and not ticket.epoch for ticket in self.waiting)

    def check_fits(self, ticket: Ticket) -> None:
        """Refuses what could not run even alone."""
        pages = -(-ticket.positions // self._page_tokens)
        if pages > self._table.total:
            raise RequestError(
                f"the request needs {ticket.positions} cached positions, the cache holds "
                f"{self._table.total * self._page_tokens}",
                "shorten the prompt, lower max_tokens, or give the engine more cache",
            )

    def add(self, ticket: Ticket) -> None:
        self.check_fits(ticket)
        newcomers = self.newcomers
        if newcomers >= self._max_waiting:
            raise BusyError(f"{newcomers} requests are waiting already")
        self._line_up(ticket)

    def find(self, request_id: str) -> Ticket | None:
        return next((t for t in self._all() if t.request.id == request_id), None)

    def drop_cancelled(self) -> list[Ticket]:
        """Takes cancelled requests out and gives their pages back."""
        gone = [ticket for ticket in self._all() if ticket.cancelled]
        for ticket in gone:
            self.finish(ticket)
        return gone

    def pause(self, ticket: Ticket) -> int:
        """Takes a request out of its slot or the line, pages and all; returns the epoch that resumes it."""
        if ticket.where != "paused":
            self._leave(ticket)
            ticket.where, ticket.epoch = "paused", ticket.epoch + 1
            self._pauses += 1
            self.paused.append(ticket)
        return ticket.epoch

    def resume(self, ticket: Ticket, epoch: int) -> None:
        """Puts a paused request in line again."""
        name = ticket.request.id
        if ticket.where != "paused":
            raise StaleEpochError(f"request '{name}' is not paused", "it was resumed already")
        if epoch != ticket.epoch:
            raise StaleEpochError(f"request '{name}' is at epoch {ticket.epoch}, not {epoch}", "it was paused again")
        self._leave(ticket)
        self._line_up(ticket)

    def admit(self) -> None:
        """Fills free slots from the line, then lets those change places whose quantum is used up."""
        short_of_pages = False
        for ticket in list(self.waiting):
            leaving = None
            if len(self.running) >= self._max_sequences:
                leaving = self._who_yields_to(ticket)
                if leaving is None:
                    break  # the line is sorted: those behind wait too
            # who cannot start is not overtaken, except by those who hold their pages and will only give some back
            if not ticket.state.pages and (short_of_pages or not self._try_start(ticket)):
                short_of_pages = True
                continue
            if leaving is not None:
                self._yield(leaving)
            self.waiting.remove(ticket)
            self.running.append(ticket)
            ticket.sit_down(next(self._turns), self._clock())

    def _who_yields_to(self, newcomer: Ticket) -> Ticket | None:
        """The lowest priority's sequence that has had most, if it may be asked to make room for this one."""
        aged = newcomer.aged(self._clock())
        candidates = [
            t for t in self.running if t.level < newcomer.priority or (t.priority <= aged and t.served >= self._quantum)
        ]
        return min(candidates, key=lambda t: (t.priority, -t.served), default=None)

    def _yield(self, ticket: Ticket) -> None:
        """Back into the line: to its end, or to its old place if it was cut short."""
        self.running.remove(ticket)
        self._line_up(ticket, keeps_place=ticket.served < self._quantum)

    def _line_up(self, ticket: Ticket, keeps_place: bool = False) -> None:
        ticket.where = "waiting"
        if not keeps_place:
            ticket.place, ticket.since = next(self._places), self._clock()
        insort(self.waiting, ticket, key=lambda t: t.order)

    def _try_start(self, ticket: Ticket) -> bool:
        """Starts a sequence if it can; one that could not is not tried again before something has come free."""
        if self._stuck == (ticket, self._supply()):
            return False
        started = self._start(ticket)
        self._stuck = None if started else (ticket, self._supply())
        return started

    def _supply(self) -> tuple[int, ...]:
        """Changes whenever pages or slots of states may have come free: only then can more requests start."""
        return self._table.releases, self._pauses, 0 if self._states is None else self._states.available

    def _start(self, ticket: Ticket) -> bool:
        """Gives a sequence its pages, a shared prefix first; False leaves everything as it was."""
        tokens = ticket.kept_tokens or ticket.request.prompt_ids
        cached: list[int] = []
        branch = 0
        if self._prefix is not None and ticket.request.cache_prompt:
            cached = self._prefix.take(tokens, ticket.draft_key)
            branch = self._prefix.last_match
        missing = -(-ticket.positions // self._page_tokens) - len(cached)
        if not (self._make_state_room() and self._make_room(missing)):
            if self._prefix is not None:
                self._prefix.give_back(cached)
            return False
        ticket.state.start(tokens, cached)
        ticket.state.reserve(ticket.positions)
        ticket.state.branch = branch
        if not ticket.generated:
            ticket.cached_tokens = ticket.state.length
        ticket.kept_tokens = ()
        return True

    def _make_room(self, pages: int) -> bool:
        """Frees pages of the prefix cache, then of paused sequences; asked first, so that nobody loses any in vain."""
        if pages <= self._table.free:
            return True
        found = self._table.free + self._evictable(pages)
        if found < pages and found + self._reclaimable() < pages:
            return False
        for ticket in list(self.paused):
            # the cache is walked through only when the pages taken so far could be enough
            if found >= pages and (found := self._table.free + self._evictable(pages)) >= pages:
                break
            found += len(ticket.state.pages)
            self._take_pages_of(ticket)
        if self._prefix is not None:
            self._prefix.evict(pages - self._table.free)
        # what a paused sequence gives back stays in the prefix cache where a page of a running one stands behind it
        return pages <= self._table.free

    def _make_state_room(self) -> bool:
        """Where the target is recurrent: a slot for one more state, if need be a paused sequence's."""
        if self._states is None or self._states.available:
            return True
        holder = next((ticket for ticket in self.paused if ticket.state.pages), None)
        if holder is not None:
            self._take_pages_of(holder)
        return holder is not None

    def _evictable(self, enough: int) -> int:
        return self._prefix.evictable(enough) if self._prefix is not None else 0

    def _reclaimable(self) -> int:
        """Pages only paused sequences and the prefix cache hold."""
        holders = Counter(page for ticket in self.paused for page in ticket.state.pages)
        if not holders:
            return 0
        cached = set(self._prefix.held()) if self._prefix is not None else set()
        return sum(self._table.holders(page) == count + (page in cached) for page, count in holders.items())

    @staticmethod
    def _take_pages_of(ticket: Ticket) -> None:
        if ticket.state.pages:
            ticket.kept_tokens = tuple(ticket.state.tokens)
            ticket.state.release()

    def plan(self) -> StepPlan:
        """Every decoding sequence, and prefill chunks: as many as a step takes, or one chunk's rows beside decoding.

        Beside decoding, prompts get a quarter of the time: after a step with both, decoding goes on alone for three
        times as long as that step took. So prompts make a stream slower by a third at most. Prompts take turns: the
        prompt whose last chunk is longest ago comes first, so that a short prompt does not wait for a long one. A
        sequence that is not ready is left out where a token would be chosen; it keeps its slot.
        """
        plan = StepPlan()
        prefilling: list[Ticket] = []
        for ticket in self.running:
            if ticket.prefilling:
                prefilling.append(ticket)
            elif ticket.ready():
                plan.decode.append(ticket)
        if not (plan.decode and self._owed_s):
            self._add_prompts(plan, prefilling)
        return plan

    def took(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a planned step took."""
        if plan.decode:
            self._owed_s = _DECODING_SHARE * seconds if plan.prefill else max(0.0, self._owed_s - seconds)
        else:
            self._owed_s = 0.0

    def _add_prompts(self, plan: StepPlan, prefilling: list[Ticket]) -> None:
        room, now = self._chunk if plan.decode else self._step_rows, self._clock()
        for ticket in sorted(prefilling, key=lambda t: (-t.aged(now, t.chunk_at), t.turn)):
            start = ticket.state.length
            # chunk borders lie on an absolute grid, so a prompt is summed the same way whatever shares the step
            stop = min((start // self._chunk + 1) * self._chunk, ticket.prefill_end)
            chunk, ready = PrefillChunk(ticket, start, stop), ticket.ready()
            if chunk.last and not ready:
                continue
            if plan.prefill and stop - start > room:
                break
            ticket.turn, ticket.chunk_at = next(self._turns), now
            plan.prefill.append(chunk)
            room -= stop - start

    def finish(self, ticket: Ticket) -> None:
        self._leave(ticket)
        ticket.state.release()

    def _leave(self, ticket: Ticket) -> None:
        {"waiting": self.waiting, "running": self.running, "paused": self.paused}[ticket.where].remove(ticket)

    def check(self) -> None:
        """No page is held by nobody, or by somebody who does not know it."""
        held = [page for ticket in self._all() for page in ticket.state.pages]
        if self._prefix is not None:
            held += self._prefix.held()
        self._table.check(held)
        for ticket in self._all():
            ticket.state.check()
        if self._states is not None:
            parts = [ticket.state.recurrent for ticket in self._all()]
            held = [slot for part in parts if part is not None for slot in part.held]
            self._states.check(held, self._table)

    def _all(self) -> Iterator[Ticket]:
        yield from self.running
        yield from self.waiting
        yield from self.paused
