"""What drafting has been worth lately: accepted tokens to expect from so many verified nodes, as a moving average."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

SIZES = (1, 3, 7, 15, 31, 63, 127, 255)  # nodes the curves are kept at
_PLACES = {size: place for place, size in enumerate(SIZES)}
_SLOWEST = 0.15  # share of the newest curve once the average has settled
_LARGEST_CORRECTION = 50.0
_TINY = 1e-9
_QUOTIENT_KEEP, _QUOTIENT_PRIOR = 0.95, 20.0
_UNKNOWN_CHANCE = 0.7  # of each drafted token, before any draft was seen


class Draft(NamedTuple):
    """The survival probabilities of one draft and the curves they make."""

    survivals: Sequence[float]  # of the chain, by depth
    chain: tuple[float, ...]
    tree: tuple[float, ...]  # empty if no tree was grown

    @classmethod
    def of(cls, chain: Sequence[float], tree: Sequence[float]) -> Draft:
        return cls(chain, _curve(chain), _curve(tree) if tree else ())


class Gains:
    """Expected accepted tokens over verified nodes, for chains and trees apart; unknown until the first curve."""

    def __init__(self, source: Gains | None = None) -> None:
        if source is not None:
            source._settle()
        self.chain: tuple[float, ...] = source.chain if source else ()
        self.tree: tuple[float, ...] = source.tree if source else ()
        self._correction = 1.0  # that the curves have not had yet
        # what was seen elsewhere counts as few curves, so that a sequence soon goes by its own
        self._curves: int = min(2, source._curves) if source else 0

    @property
    def known(self) -> bool:
        return bool(self.chain)

    def blend(self, draft: Draft, proposals: int) -> None:
        """Takes in one draft; `proposals` is how many slots a full block has."""
        self._settle()
        slots = len(draft.survivals)
        deep = wide = self._whole_chain(draft, proposals)
        if draft.tree:
            reached = _between(deep, slots)
            inside = bisect_right(SIZES, slots)
            beyond = zip(draft.tree[inside:], deep[inside:], strict=True)
            wide = (*draft.tree[:inside], *[value * whole / reached if whole > 0 else value for value, whole in beyond])
        self._curves += 1
        share = max(_SLOWEST, 1.0 / self._curves) if self.known else 1.0
        self.chain = _mix(self.chain, deep, share)
        self.tree = _mix(self.tree, wide, share)

    def correct(self, ratio: float) -> None:
        """Follows a change of calibration: drafts seen before it would be valued `ratio` times as much today."""
        ratio = min(_LARGEST_CORRECTION, max(1.0 / _LARGEST_CORRECTION, ratio))
        self._correction *= ratio

    def _settle(self) -> None:
        """Brings the curves up to date, which waits until somebody looks at them."""
        if self._correction != 1.0:
            self.chain = _scaled(self.chain, self._correction)
            self.tree = _scaled(self.tree, self._correction)
            self._correction = 1.0

    def expected(self, nodes: int, slots: int, branching: bool) -> float:
        """Accepted tokens to expect from verifying `nodes` of a draft of `slots`."""
        self._settle()
        if not branching:
            return _between(self.chain, min(nodes, slots))
        return _between(self.tree, nodes) * _reach(self.chain, nodes, slots)

    def _whole_chain(self, draft: Draft, proposals: int) -> tuple[float, ...]:
        """The curve of a drafted chain, continued to the full block if fewer slots were drafted.

        It goes on as earlier ones did. A chain that did well so far must not be continued at its own mean, which
        would take its luck for skill; only the very first one has to be.
        """
        drafted, seen = len(draft.survivals), draft.chain
        if not 0 < drafted < proposals:
            return seen
        if self.known:
            scale = seen[-1] / max(_between(self.chain, drafted), _TINY)
            deeper = bisect_right(SIZES, drafted)
            return (*seen[:deeper], *map(max, seen[deeper:], [scale * before for before in self.chain[deeper:]]))
        whole = list(draft.survivals)
        fading = whole[-1] ** (1.0 / drafted)
        while len(whole) < proposals:
            whole.append(whole[-1] * fading)
        return _curve(whole)


class Depths:
    """What drafting deeper has been worth lately: tokens beyond the price of verifying them, option by option."""

    def __init__(self, source: Depths | None = None) -> None:
        self._gains: dict[int, float] = dict(source._gains) if source else {}

    def blend(self, worths: Mapping[int, float]) -> None:
        """`worths` of one draft had it been cut at so many slots, shallowest first."""
        for (_, shallow), (slots, deep) in pairwise(worths.items()):
            gain = deep - shallow
            self._gains[slots] = self._gains.get(slots, gain) + _SLOWEST * (gain - self._gains.get(slots, gain))

    def gain(self, slots: int, untried: float) -> float:
        """Of drafting this many slots over the next shallower option; `untried` if nobody has."""
        return self._gains.get(slots, untried)


class Quotient:
    """A slowly moving quotient of sums, within bounds."""

    def __init__(self, value: float, least: float, most: float) -> None:
        self._sums = (value * _QUOTIENT_PRIOR, _QUOTIENT_PRIOR)
        self._least, self._most = least, most

    def add(self, above: float, below: float) -> None:
        self._sums = (self._sums[0] * _QUOTIENT_KEEP + above, self._sums[1] * _QUOTIENT_KEEP + below)

    @property
    def value(self) -> float:
        return min(self._most, max(self._least, self._sums[0] / self._sums[1]))


def assumed_chain(slots: int) -> list[float]:
    """Survival to expect of a drafter nobody has seen work."""
    return [_UNKNOWN_CHANCE ** (slot + 1) for slot in range(slots)]


def assumed(proposals: int) -> Gains:
    """What such a chain is worth."""
    gains = Gains()
    gains.blend(Draft.of(assumed_chain(proposals), ()), proposals)
    return gains


def _curve(survival: Sequence[float]) -> tuple[float, ...]:
    sums = list(accumulate(survival)) or [0.0]
    inside = bisect_right(SIZES, len(sums))
    return (*[sums[size - 1] for size in SIZES[:inside]], *[sums[-1]] * (len(SIZES) - inside))


def _scaled(curve: Sequence[float], ratio: float) -> tuple[float, ...]:
    """No curve promises more tokens than nodes."""
    values = [value * ratio for value in curve]
    return tuple([value if value < size else size for size, value in zip(SIZES, values, strict=False)])


def _mix(old: Sequence[float], new: Sequence[float], share: float) -> tuple[float, ...]:
    return tuple([a + share * (b - a) for a, b in zip(old, new, strict=True)]) if old else tuple(new)


def _reach(chain: Sequence[float], nodes: int, slots: int) -> float:
    """What is left of a tree's gain if it may only be `slots` deep: about what is left of a chain's."""
    if nodes <= slots:
        return 1.0
    whole = _between(chain, nodes)
    return _between(chain, slots) / whole if whole > 0 else 1.0


def _between(curve: Sequence[float], nodes: int) -> float:
    place = _PLACES.get(nodes)
    if place is not None:
        return curve[place]
    if nodes < 1:
        return 0.0
    right = bisect_left(SIZES, nodes)
    if right == len(SIZES):
        return curve[-1]
    low, high = SIZES[right - 1], SIZES[right]
    return curve[right - 1] + (curve[right] - curve[right - 1]) * (nodes - low) / (high - low)
