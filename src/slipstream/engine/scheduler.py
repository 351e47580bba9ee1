"""Decides who runs: admission by pages, chunked prefill on a fixed grid, decoding every step. No tensors here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.cache.pages import PageTable
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.sequence import SequenceState
from slipstream.errors import RequestError
from slipstream.types import Request


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way through the scheduler."""

    request: Request
    state: SequenceState
    positions: int  # room the sequence may ever need, drafted rows included
    draft_key: str | None
    width: int  # rows a step of it is expected to bring at most, the anchor included; 1 is plain decoding
    max_tokens: int
    generated: int = 0
    cached_tokens: int = 0
    cancelled: bool = False

    @property
    def prefilling(self) -> bool:
        return self.generated == 0

    @property
    def room(self) -> int:
        """Tokens that may still be emitted; drafting deeper than that would be wasted."""
        return self.max_tokens - self.generated


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    ticket: Ticket
    start: int
    stop: int

    @property
    def last(self) -> bool:
        return self.stop == len(self.ticket.state.tokens)


@dataclass(slots=True)
class StepPlan:
    """The rows of one target forward."""

    prefill: list[PrefillChunk] = field(default_factory=list)
    decode: list[Ticket] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Scheduler:
    """First come, first served; a sequence is admitted only when its pages for the whole way are there."""

    def __init__(
        self, table: PageTable, prefix: PrefixCache | None, page_tokens: int, max_sequences: int, max_waiting: int,
        prefill_chunk: int, step_rows: int,
    ) -> None:
        self._table = table
        self._prefix = prefix
        self._page_tokens = page_tokens
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._chunk = prefill_chunk
        self._step_rows = step_rows
        self.waiting: deque[Ticket] = deque()
        self.running: list[Ticket] = []

    def add(self, ticket: Ticket) -> None:
        pages = -(-ticket.positions // self._page_tokens)
        if pages > self._table.total:
            raise RequestError(
                f"the request needs {ticket.positions} cached positions, the cache holds "
                f"{self._table.total * self._page_tokens}",
                "shorten the prompt, lower max_tokens, or give the engine more cache",
            )
        if len(self.waiting) >= self._max_waiting:
            raise RequestError(f"{len(self.waiting)} requests are waiting already", "try again later")
        self.waiting.append(ticket)

    def find(self, request_id: str) -> Ticket | None:
        return next((t for t in self._all() if t.request.id == request_id), None)

    def drop_cancelled(self) -> list[Ticket]:
        """Takes cancelled requests out and gives their pages back."""
        gone = [ticket for ticket in self._all() if ticket.cancelled]
        for ticket in gone:
            self.finish(ticket)
        return gone

    def admit(self) -> None:
        """Moves waiting requests in while sequences and pages allow; a shared prefix is taken over here."""
        while self.waiting and len(self.running) < self._max_sequences:
            if not self._start(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())

    def _start(self, ticket: Ticket) -> bool:
        tokens = ticket.request.prompt_ids
        cached: list[int] = []
        if self._prefix is not None and ticket.request.cache_prompt:
            cached = self._prefix.take(tokens, ticket.draft_key)
        missing = -(-ticket.positions // self._page_tokens) - len(cached)
        short = missing - self._table.free
        # asked first: a request that cannot start yet must not cost others their cached pages
        if short > 0:
            if self._prefix is None:
                return False
            if self._prefix.evictable() < short:
                self._prefix.give_back(cached)
                return False
            self._prefix.evict(short)
        ticket.state.start(tokens, cached)
        ticket.state.reserve(ticket.positions)
        ticket.cached_tokens = ticket.state.length
        return True

    def plan(self) -> StepPlan:
        """Every decoding sequence, then prefill chunks while the step has room (always at least one)."""
        plan = StepPlan(decode=[ticket for ticket in self.running if not ticket.prefilling])
        rows = sum(ticket.width for ticket in plan.decode)
        for ticket in self.running:
            if not ticket.prefilling:
                continue
            start = ticket.state.length
            # chunk borders lie on an absolute grid, so a prompt is summed the same way whoever shares the step
            stop = min((start // self._chunk + 1) * self._chunk, len(ticket.state.tokens))
            if plan.prefill and rows + stop - start > self._step_rows:
                break
            plan.prefill.append(PrefillChunk(ticket, start, stop))
            rows += stop - start
        return plan

    def finish(self, ticket: Ticket) -> None:
        if ticket in self.running:
            self.running.remove(ticket)
        else:
            self.waiting.remove(ticket)
        ticket.state.release()

    def check(self) -> None:
        """No page is held by nobody, or by somebody who does not know it."""
        held = [page for ticket in self.running for page in ticket.state.pages]
        if self._prefix is not None:
            held += self._prefix.held()
        self._table.check(held)
        for ticket in self.running:
            ticket.state.check()

    def _all(self) -> Iterator[Ticket]:
        yield from self.running
        yield from self.waiting
