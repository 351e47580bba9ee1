"""Drafts from the text that is already there: what followed the earlier occurrences of a sequence's last tokens.

A text that quotes, edits or repeats itself goes on as it went on before. One index belongs to one sequence and holds
the tokens of its prompt and its answer.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import partial

from slipstream.kernels.cpu.native_text import CompiledText, compiled_text
from slipstream.speculative.estimate import Estimate
from slipstream.speculative.tree import Calibrate, Growth, as_claimed
from slipstream.types import Source

# The lengths, in tokens, of the grams whose occurrences are remembered. Each is twice the one before it, because a gram
# is named by its two halves. Every length costs up to 100 bytes and 0.5 us per token (docs/log.md). Without the long
# ones, a long match that lies behind many recent short ones would be missed.
_SPANS = (1, 2, 4, 8, 16)
# Tokens up to which a match is measured; a longer match counts as this long. With 16, drafts on the editing set commit
# 0.2 % fewer tokens a step, with 64 0.1 % more, and a query takes longer.
LONGEST_MATCH = 32
# How many earlier occurrences one query looks at. Its time grows with them. With 4, drafts commit up to 4 % fewer
# tokens a step in a text of 12,000 tokens, and 16 win nothing (docs/log.md).
MOST_OCCURRENCES = 8
MOST_FOLLOWED = 2048  # tokens of a prompt that one step takes over: about 6 ms in Python
_NAME_BITS = 32  # A gram's key holds the names of both halves; tokens and positions are below 2**31.

Occurrence = tuple[int, int]  # how many tokens match, and the position of the last of them


class TextIndex(ABC):
    """The tokens of one sequence, and where its last tokens occurred before."""

    length = 0  # tokens of the text

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text, each in constant time."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of the text; the time depends on the tokens that go."""

    @abstractmethod
    def fork(self) -> TextIndex:
        """Returns an index of the same text that changes on its own; it takes a copy of everything."""

    @abstractmethod
    def occurrences(self) -> list[Occurrence]:
        """Returns earlier occurrences of the text's end: the longest match first, and the most recent of equal ones.

        Matches of at least 16 tokens are taken first, then those of at least 8, and so on, each time the most recent
        ones, until there are MOST_OCCURRENCES.
        """

    @abstractmethod
    def grow(
        self, most_nodes: int, depth: int, estimate: Estimate | None = None, floor: float = 0.0, first: float = 0.0
    ) -> Growth:
        """Returns the likeliest continuations as a tree: no node deeper than `depth` or less likely than `floor`.

        A row stands for the earlier occurrences that went on as the path to that row does; docs/log.md compares what
        rows claim with what was accepted. Without an estimate, claims are taken as they are. The tree has no node if
        the last token is new, or if the likeliest next token is less likely than `first`, which saves the search. The
        text must not be empty.
        """

    def follow(self, tokens: Sequence[int]) -> bool:
        """Follows a text that has become longer or shorter; returns whether the index holds all of it.

        A long text is taken over in pieces, one at each call, because the steps of all sequences wait meanwhile.
        """
        if len(tokens) < self.length:
            self.truncate(len(tokens))
        self.extend(tokens[self.length : self.length + MOST_FOLLOWED])
        return self.length == len(tokens)


def text_index() -> TextIndex:
    """Returns an index of an empty text, compiled if this machine has compiled kernels."""
    text = compiled_text(len(_SPANS), LONGEST_MATCH, MOST_OCCURRENCES)
    return SuffixIndex() if text is None else CompiledIndex(text)


class CompiledIndex(TextIndex):
    """The index in compiled memory; it finds what SuffixIndex finds."""

    def __init__(self, text: CompiledText, length: int = 0) -> None:
        self.length = length
        self._text = text

    def extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)
        self.length += len(tokens)

    def truncate(self, length: int) -> None:
        self._text.truncate(length)
        self.length = length

    def fork(self) -> CompiledIndex:
        return CompiledIndex(self._text.copy(), self.length)

    def occurrences(self) -> list[Occurrence]:
        return self._text.occurrences(MOST_OCCURRENCES)

    def grow(
        self, most_nodes: int, depth: int, estimate: Estimate | None = None, floor: float = 0.0, first: float = 0.0
    ) -> Growth:
        table = estimate.table(Source.TEXT) if estimate is not None else None
        nodes = self._text.grow(table, most_nodes, depth, floor, first)
        rows = nodes.rows
        if rows == 1:  # the usual case; reading all lists takes ten times as long
            return Growth([nodes.tokens[0]], sources=[Source.TEXT])
        return Growth(*nodes.lists(), [Source.TEXT] * rows)


class SuffixIndex(TextIndex):
    """The index in Python."""

    def __init__(self) -> None:
        self._text = array("i")
        self._levels = [_Grams(span) for span in _SPANS]

    def extend(self, tokens: Sequence[int]) -> None:
        self._text.extend(tokens)
        self.length = len(self._text)
        halves = self._text
        for level in self._levels:
            level.extend(halves)
            halves = level.names

    def truncate(self, length: int) -> None:
        halves = [self._text, *(level.names for level in self._levels)]
        for number in reversed(range(len(self._levels))):
            self._levels[number].truncate(halves[number], length)
        del self._text[length:]
        self.length = length

    def fork(self) -> SuffixIndex:
        copied = SuffixIndex()
        copied._text = self._text[:]
        copied._levels = [level.copy() for level in self._levels]
        copied.length = self.length
        return copied

    def grow(
        self, most_nodes: int, depth: int, estimate: Estimate | None = None, floor: float = 0.0, first: float = 0.0
    ) -> Growth:
        calibrate = as_claimed if estimate is None else partial(estimate.chance, source=Source.TEXT)
        claim = claim_of(1.0, self._longest_match())
        if not claim or calibrate(claim, 1) < max(floor, first):
            return Growth([self._text[-1]], sources=[Source.TEXT])
        return _grow(self._text, self.occurrences(), most_nodes, depth, calibrate, floor)

    def _longest_match(self) -> int:
        """Returns the most tokens at the text's end that can have occurred together before."""
        last, bound = len(self._text) - 1, 0
        for level in self._levels:
            if level.older[last] < 0:
                return bound
            bound = 2 * level.span - 1
        return LONGEST_MATCH

    def occurrences(self) -> list[Occurrence]:
        last = len(self._text) - 1
        found: dict[int, int] = {}
        for level in reversed(self._levels):
            older = level.older
            end = older[last] if last >= 0 else -1
            while end >= 0 and len(found) < MOST_OCCURRENCES:
                if end not in found:
                    found[end] = self._match(end, last)
                end = older[end]
        return sorted(((match, end) for end, match in found.items()), reverse=True)

    def _match(self, end: int, last: int) -> int:
        """Returns how many tokens up to `end` equal those up to `last`, at most LONGEST_MATCH."""
        start, least = end, end - LONGEST_MATCH
        for level in reversed(self._levels):
            span, names = level.span, level.names
            while end - span >= max(least, -1) and names[end] == names[last]:
                end, last = end - span, last - span
        return start - end


class _Grams:
    """All grams of one length; each is known by the position of its last token.

    A gram's name is the position where it occurred first, so that grams are equal if their names are. A gram of twice
    the length is two names, which makes its key exact and short.
    """

    def __init__(self, span: int) -> None:
        self.span = span
        self.names = array("i")  # by position; -1 where the text is still shorter than the gram
        self.older = array("i")  # by position: where the gram occurred the last time before, or -1
        self._newest: dict[int, int] = {}  # the last position of each gram, by its key

    def extend(self, halves: array[int]) -> None:
        """Adds the positions that `halves`, the names of the grams of half the length, has beyond this level."""
        names, older, newest, half = self.names, self.older, self._newest, self.span // 2
        for position in range(len(names), len(halves)):
            if position < self.span - 1:
                names.append(-1)
                older.append(-1)
                continue
            key = halves[position - half] << _NAME_BITS | halves[position]
            before = newest.get(key, -1)
            names.append(position if before < 0 else names[before])
            older.append(before)
            newest[key] = position

    def truncate(self, halves: array[int], length: int) -> None:
        """Removes the positions from `length` on, which `halves` must still have."""
        older, newest, half = self.older, self._newest, self.span // 2
        for position in reversed(range(max(length, self.span - 1), len(older))):
            key = halves[position - half] << _NAME_BITS | halves[position]
            if older[position] < 0:
                del newest[key]
            else:
                newest[key] = older[position]
        del self.names[length:], older[length:]

    def copy(self) -> _Grams:
        copied = _Grams(self.span)
        copied.names, copied.older, copied._newest = self.names[:], self.older[:], self._newest.copy()
        return copied


def claim_of(share: float, known: int) -> float:
    """Returns the claim of a token: this share of the occurrences go on with it, and `known` tokens before it match."""
    return share * known / (known + 1)


def _grow(
    text: array[int], occurrences: list[Occurrence], most_nodes: int, depth: int, calibrate: Calibrate, floor: float
) -> Growth:
    """Adds the likeliest continuation again and again."""
    growth = Growth([text[-1]], sources=[Source.TEXT])
    # (-survival, order, parent, token, claim, occurrences); the order decides between equally likely ones
    heap: list[tuple[float, int, int, int, float, list[Occurrence]]] = []
    order, row, here = 0, 0, occurrences
    while growth.nodes < most_nodes:
        step = growth.depths[row]
        if step < depth:
            for token, share, group in _continuations(text, here, step):
                # So many tokens before this one are the same at the best occurrence.
                claim = claim_of(share, group[0][0] + step)
                survival = growth.survivals[row] * calibrate(claim, step + 1)
                if survival >= floor:
                    order += 1
                    heapq.heappush(heap, (-survival, order, row, token, claim, group))
        if not heap:
            break
        negative, _, parent, token, claim, here = heapq.heappop(heap)
        row = growth.add(parent, token, claim, -negative)
        growth.sources.append(Source.TEXT)
    return growth


def _continuations(
    text: array[int], occurrences: list[Occurrence], step: int
) -> list[tuple[int, float, list[Occurrence]]]:
    """Returns the tokens that came `step` tokens after the occurrences, with their shares and their occurrences.

    An occurrence near the end of the text goes on with what has just been drafted after it: a text that has repeated
    itself is expected to do so again.
    """
    last = len(text) - 1
    if len(occurrences) == 1:
        end = occurrences[0][1]
        return [(text[end + 1 + step % (last - end)], 1.0, occurrences)]
    groups: dict[int, list[Occurrence]] = {}
    weights: dict[int, int] = {}
    for occurrence in occurrences:
        match, end = occurrence
        token = text[end + 1 + step % (last - end)]
        groups.setdefault(token, []).append(occurrence)
        weights[token] = weights.get(token, 0) + match
    total = sum(weights.values())
    return [(token, weights[token] / total, group) for token, group in groups.items()]
