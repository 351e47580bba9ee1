"""Decides which sequences run: the queue and its slots, admission by pages, turns, pauses, prefill on a fixed grid.

This module holds no tensors. A request with a larger priority goes first; among equal priorities, the earlier request
does. While no sequence waits, every running sequence keeps its slot. While one waits, a running sequence gives its slot
to the first waiting sequence that can really start: to one of a larger priority at once, and to one of the same
priority when the running sequence has used up its quantum. The sequence that gives its slot up keeps its pages and goes
to the end of the queue, so that it goes on later without computing anything twice. A request's priority rises while it
waits, so that a steady stream of requests with larger priorities cannot keep it waiting for ever.
"""

from __future__ import annotations

import itertools
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from slipstream.cache.pages import PageTable
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.recurrent import StatePool
from slipstream.cache.sequence import SequenceState
from slipstream.errors import BusyError, RequestError
from slipstream.types import Request

# Tokens a sequence decodes before it may have to hand its slot over. With fewer, sequences change places more often,
# which costs a new plan each time; with more, a short request waits longer behind long ones.
QUANTUM_TOKENS = 64
# Waiting this long counts as one priority more. Answers take seconds, so a larger priority still goes first in a busy
# hour; a request of the smallest priority (-100) overtakes one of the largest (100) after 33 minutes.
AGEING_S = 10.0
# Steps with prompts and steps without share the time 1 to 3. At 1 to 2, a client that sends short requests without a
# pause makes its neighbours 1.9 times as slow and sometimes more than twice; at 1 to 3, 1.7 times.
_DECODING_SHARE = 3
_ROWS_PER_TOKEN = 8  # so many prefilled rows take about as long as one decoded token, and count as one in a quantum

Phase = Literal["waiting", "prefill", "decode", "yielded", "paused", "paused-evicted"]


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """A sequence as the scheduler sees it."""

    request: Request
    state: SequenceState
    positions: int  # cached positions the sequence may ever need, drafted rows included
    draft_key: str | None
    max_tokens: int
    generated: int = 0
    cached_tokens: int = 0
    cancelled: bool = False
    newcomer: bool = True  # it has neither had a slot nor been paused; only the line of newcomers is bounded
    ready: Callable[[], bool] = lambda: True  # whether a token could be chosen for the sequence now
    where: Literal["waiting", "running", "paused"] = "waiting"
    place: int = 0  # its place in the queue, by arrival
    since: float = 0.0  # when it joined the queue; its priority rises from then on
    # its raised priority when it got its slot; only a larger one takes the slot away before the quantum is used up
    level: int = 0
    turn: int = 0  # orders prompts by their last chunk, or by when they got their slots
    chunk_at: float = 0.0  # when its last chunk ran or it got its slot; the priority of its prompt rises from then on
    kept_tokens: tuple[int, ...] = ()  # a sequence that lost its pages is computed again from these
    _slot_taken_at: tuple[int, int] = (0, 0)  # generated tokens and computed positions when it got its slot

    @property
    def prefilling(self) -> bool:
        # After the first token only the anchor has still to run, unless the sequence lost its pages.
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
        """Its place in the queue: a priority more is worth as much as having come `AGEING_S` earlier."""
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

    def take_slot(self, turn: int, now: float) -> None:
        self.newcomer = False
        self.where, self.turn, self.level, self.chunk_at = "running", turn, self.aged(now), now
        self._slot_taken_at = (self.generated, self.state.length)

    @property
    def served(self) -> int:
        """What it got in its slot so far: decoded tokens, and prefilled rows converted to tokens."""
        tokens = self.generated - self._slot_taken_at[0]
        rows = self.state.length - self._slot_taken_at[1] - tokens
        return tokens + max(0, rows) // _ROWS_PER_TOKEN


Scheduled = TypeVar("Scheduled", bound=ScheduledSequence)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a request needs of the engine, known before it runs."""

    positions: int  # cached positions, drafted rows included
    max_tokens: int
    draft_key: str | None  # names the draft context it may share; None if it drafts nothing


@dataclass(frozen=True, slots=True)
class PrefillChunk(Generic[Scheduled]):
    """Consecutive prompt positions of one sequence that one step computes."""

    sequence: Scheduled
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """Whether the chunk yields a first token; a sequence that is computed again has its tokens already."""
        return self.stop == len(self.sequence.state.tokens)


@dataclass(slots=True)
class StepPlan(Generic[Scheduled]):
    """The rows of one target forward."""

    prefill: list[PrefillChunk[Scheduled]] = field(default_factory=list)
    decode: list[Scheduled] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """How many sequences run and wait, how many rows a step has, and how long a sequence keeps a slot it must share."""

    max_sequences: int
    max_waiting: int
    prefill_chunk: int
    step_rows: int
    quantum: int = QUANTUM_TOKENS


class Scheduler(Generic[Scheduled]):
    """Admits a sequence only when all pages it can ever need are free, so that a running sequence can always finish."""

    def __init__(
        self,
        table: PageTable,
        prefix: PrefixCache | None,
        page_tokens: int,
        limits: SchedulerLimits,
        states: StatePool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._prefix = prefix
        self._page_tokens = page_tokens
        self.limits = limits
        self._states = states
        self._clock = clock
        self._owed_s = 0.0  # seconds that decoding goes on alone before the next prompt
        self._pauses = 0
        # The sequence that could not start, and the supply it could not start from.
        self._stuck: tuple[Scheduled, tuple[int, ...]] | None = None
        self._places = itertools.count()
        self._turns = itertools.count()
        self.waiting: list[Scheduled] = []  # in the order of service; a sequence that yielded its slot keeps its pages
        self.running: list[Scheduled] = []
        self.paused: list[Scheduled] = []  # the one paused first comes first

    @property
    def busy(self) -> bool:
        """Whether a step would do anything; paused sequences alone give it nothing to do."""
        return bool(self.running or self.waiting) or any(sequence.cancelled for sequence in self.paused)

    @property
    def newcomers(self) -> int:
        """Waiting requests that have not run yet; one that was paused comes back without being counted."""
        return sum(sequence.newcomer for sequence in self.waiting)

    def check_fits(self, positions: int) -> None:
        """Refuses a request that could not run even alone."""
        pages = -(-positions // self._page_tokens)
        if pages > self._table.total:
            raise RequestError(
                f"the request needs {positions} cached positions, the cache holds "
                f"{self._table.total * self._page_tokens}",
                "shorten the prompt, lower max_tokens, or give the engine more cache",
            )

    def add(self, sequence: Scheduled) -> None:
        """Queues a sequence that fits (`check_fits`); refuses it while too many sequences wait that have never run."""
        newcomers = self.newcomers
        if newcomers >= self.limits.max_waiting:
            raise BusyError(f"{newcomers} requests are waiting already")
        self._line_up(sequence)

    def drop_cancelled(self) -> list[Scheduled]:
        """Takes cancelled requests out and gives their pages back."""
        gone = [sequence for sequence in self._all() if sequence.cancelled]
        for sequence in gone:
            self.finish(sequence)
        return gone

    def pause(self, sequence: Scheduled) -> None:
        """Takes a sequence out of its slot or the queue; it keeps its pages. Pausing twice is pausing once."""
        if sequence.where != "paused":
            self._leave(sequence)
            sequence.where, sequence.newcomer = "paused", False
            self._pauses += 1
            self.paused.append(sequence)

    def resume(self, sequence: Scheduled) -> bool:
        """Puts a paused sequence into the queue again; returns False if it is not paused."""
        if sequence.where != "paused":
            return False
        self._leave(sequence)
        self._line_up(sequence)
        return True

    def admit(self) -> None:
        """Fills free slots from the queue, then lets sequences change places whose quantum is used up."""
        short_of_pages = False
        for sequence in list(self.waiting):
            leaving = None
            if len(self.running) >= self.limits.max_sequences:
                leaving = self._yielding_to(sequence)
                if leaving is None:
                    break  # the queue is sorted: all further sequences wait too
            # A sequence that cannot start is overtaken only by sequences that hold their pages already.
            if not sequence.state.pages and (short_of_pages or not self._try_start(sequence)):
                short_of_pages = True
                continue
            if leaving is not None:
                self._yield(leaving)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.take_slot(next(self._turns), self._clock())

    def _yielding_to(self, newcomer: Scheduled) -> Scheduled | None:
        """The running sequence of the lowest priority that had most of its slot, if it must yield to this one."""
        aged, quantum = newcomer.aged(self._clock()), self.limits.quantum
        candidates = [
            t for t in self.running if t.level < newcomer.priority or (t.priority <= aged and t.served >= quantum)
        ]
        return min(candidates, key=lambda t: (t.priority, -t.served), default=None)

    def _yield(self, sequence: Scheduled) -> None:
        """Puts a running sequence back into the queue: at its end, or at its old place if it was cut short."""
        self.running.remove(sequence)
        self._line_up(sequence, keeps_place=sequence.served < self.limits.quantum)

    def _line_up(self, sequence: Scheduled, keeps_place: bool = False) -> None:
        sequence.where = "waiting"
        if not keeps_place:
            sequence.place, sequence.since = next(self._places), self._clock()
        insort(self.waiting, sequence, key=lambda t: t.order)

    def _try_start(self, sequence: Scheduled) -> bool:
        """Starts a sequence if it can; one that could not start is tried again only after pages or slots came free."""
        if self._stuck == (sequence, self._supply()):
            return False
        started = self._start(sequence)
        self._stuck = None if started else (sequence, self._supply())
        return started

    def _supply(self) -> tuple[int, ...]:
        """A value that changes whenever pages or state slots may have come free: only then can more sequences start."""
        return self._table.releases, self._pauses, 0 if self._states is None else self._states.available

    def _start(self, sequence: Scheduled) -> bool:
        """Gives a sequence its pages, a shared prefix first; False leaves everything as it was."""
        tokens = sequence.kept_tokens or sequence.request.prompt_ids
        cached: list[int] = []
        branch = 0
        if self._prefix is not None and sequence.request.cache_prompt:
            cached = self._prefix.take(tokens, sequence.draft_key)
            branch = self._prefix.last_match
        missing = -(-sequence.positions // self._page_tokens) - len(cached)
        if not (self._make_state_room() and self._make_room(missing)):
            if self._prefix is not None:
                self._prefix.give_back(cached)
            return False
        sequence.state.start(tokens, cached)
        sequence.state.reserve(sequence.positions)
        sequence.state.branch = branch
        if not sequence.generated:
            sequence.cached_tokens = sequence.state.length
        sequence.kept_tokens = ()
        return True

    def _make_room(self, pages: int) -> bool:
        """Frees pages of the prefix cache, then of paused sequences, but only if that will be enough."""
        if pages <= self._table.free:
            return True
        found = self._table.free + self._evictable(pages)
        if found < pages and found + self._reclaimable() < pages:
            return False
        for sequence in list(self.paused):
            # Counting the cache's pages takes long, so it is done only when the pages taken so far could be enough.
            if found >= pages and (found := self._table.free + self._evictable(pages)) >= pages:
                break
            found += len(sequence.state.pages)
            self._take_pages_of(sequence)
        if self._prefix is not None:
            self._prefix.evict(pages - self._table.free)
        # A page that a paused sequence gave back stays in the prefix cache while a running sequence uses a later page.
        return pages <= self._table.free

    def _make_state_room(self) -> bool:
        """Finds a slot for one more recurrent state, if need be by taking that of a paused sequence."""
        if self._states is None or self._states.available:
            return True
        holder = next((sequence for sequence in self.paused if sequence.state.pages), None)
        if holder is not None:
            self._take_pages_of(holder)
        return holder is not None

    def _evictable(self, enough: int) -> int:
        return self._prefix.evictable(enough) if self._prefix is not None else 0

    def _reclaimable(self) -> int:
        """Pages that only paused sequences and the prefix cache hold."""
        holders = Counter(page for sequence in self.paused for page in sequence.state.pages)
        if not holders:
            return 0
        cached = set(self._prefix.held()) if self._prefix is not None else set()
        return sum(self._table.holders(page) == count + (page in cached) for page, count in holders.items())

    @staticmethod
    def _take_pages_of(sequence: Scheduled) -> None:
        if sequence.state.pages:
            sequence.kept_tokens = tuple(sequence.state.tokens)
            sequence.state.release()

    def plan(self) -> StepPlan[Scheduled]:
        """Plans a step: decoding sequences with prompt rows of up to one chunk, or prompts alone with more rows.

        Beside decoding, prompts get a quarter of the time: after a step with both, decoding goes on alone for three
        times as long as that step took. So prompts make a stream slower by a third at most. Prompts take turns: the
        prompt whose last chunk is longest ago comes first, so that a short prompt does not wait for a long one. A
        sequence that is not ready is left out where a token would be chosen; it keeps its slot.
        """
        plan = StepPlan[Scheduled]()
        prefilling: list[Scheduled] = []
        for sequence in self.running:
            if sequence.prefilling:
                prefilling.append(sequence)
            elif sequence.ready():
                plan.decode.append(sequence)
        if not (plan.decode and self._owed_s):
            self._add_prompts(plan, prefilling)
        return plan

    def took(self, plan: StepPlan[Scheduled], seconds: float) -> None:
        """Notes how long a planned step took."""
        if plan.decode:
            self._owed_s = _DECODING_SHARE * seconds if plan.prefill else max(0.0, self._owed_s - seconds)
        else:
            self._owed_s = 0.0

    def _add_prompts(self, plan: StepPlan[Scheduled], prefilling: list[Scheduled]) -> None:
        chunk_rows = self.limits.prefill_chunk
        room, now = chunk_rows if plan.decode else self.limits.step_rows, self._clock()
        for sequence in sorted(prefilling, key=lambda t: (-t.aged(now, t.chunk_at), t.turn)):
            start = sequence.state.length
            # Chunk borders lie on an absolute grid, so that a prompt is summed the same way whatever shares the step.
            stop = min((start // chunk_rows + 1) * chunk_rows, sequence.prefill_end)
            chunk, ready = PrefillChunk(sequence, start, stop), sequence.ready()
            if chunk.last and not ready:
                continue
            if plan.prefill and stop - start > room:
                break
            sequence.turn, sequence.chunk_at = next(self._turns), now
            plan.prefill.append(chunk)
            room -= stop - start

    def finish(self, sequence: Scheduled) -> None:
        self._leave(sequence)
        sequence.state.release()

    def _leave(self, sequence: Scheduled) -> None:
        {"waiting": self.waiting, "running": self.running, "paused": self.paused}[sequence.where].remove(sequence)

    def check(self) -> None:
        """Checks that a sequence or the prefix cache lists each page in use, and that every sequence's parts agree."""
        held = [page for sequence in self._all() for page in sequence.state.pages]
        if self._prefix is not None:
            held += self._prefix.held()
        self._table.check(held)
        for sequence in self._all():
            sequence.state.check()
        if self._states is not None:
            parts = [sequence.state.recurrent for sequence in self._all()]
            held = [slot for part in parts if part is not None for slot in part.held]
            self._states.check(held, self._table)

    def _all(self) -> list[Scheduled]:
        return [*self.running, *self.waiting, *self.paused]
