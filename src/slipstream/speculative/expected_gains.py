"""Moving averages of what drafting has been worth: accepted tokens over the number of verified nodes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

# Numbers of nodes at which the curves are kept; values between them are interpolated. More sizes cost host time in
# every step, fewer make the curves too coarse where rows are cheap.
SIZES = (1, 3, 7, 15, 31, 63, 127, 255)
_PLACES = {size: place for place, size in enumerate(SIZES)}
# docs/log.md holds the measurements behind the policy; figures about a single value are repeated below.

# Weight of the newest curve once the average has settled. A larger weight follows luck, a smaller one follows a change
# of the text too slowly; values from 0.10 to 0.30 were within 2 % of each other in replays.
_NEWEST_SHARE = 0.15
_LARGEST_CORRECTION = 50.0  # One change of calibration scales the gains by at most this factor, up or down.
_TINY = 1e-9  # It keeps a division from having a zero below; it is far below every real gain.
# SharedRecord of a ratio: the share of both sums that is kept at each new pair, and the weight of the first value.
_RATIO_KEEP, _RATIO_PRIOR = 0.95, 20.0
# Assumed acceptance probability of each drafted token before any draft of its kind was seen. If it is too low, drafting
# is never tried; if it is too high, the first drafts of a bad drafter are too deep.
_UNKNOWN_CHANCE = 0.7


class DraftCurves(NamedTuple):
    """The survival probabilities of one draft's nodes, and the curves of expected tokens that they make."""

    survivals: Sequence[float]  # of the chain's nodes, by depth
    chain: tuple[float, ...]
    tree: tuple[float, ...]  # empty if no tree was grown

    @classmethod
    def of(cls, chain: Sequence[float], tree: Sequence[float]) -> DraftCurves:
        return cls(chain, _curve(chain), _curve(tree) if tree else ())


class ExpectedGains:
    """Expected accepted tokens by the number of verified nodes, for chains and for trees; unknown before a draft."""

    def __init__(self, source: ExpectedGains | None = None) -> None:
        if source is not None:
            source._settle()
        self.chain: tuple[float, ...] = source.chain if source else ()
        self.tree: tuple[float, ...] = source.tree if source else ()
        self._correction = 1.0  # a factor that has not been applied to the curves yet
        # Curves taken over from other requests count as at most two, so that a sequence soon follows its own drafts.
        self._curves: int = min(2, source._curves) if source else 0

    @property
    def known(self) -> bool:
        return bool(self.chain)

    def blend(self, draft: DraftCurves, proposals: int) -> None:
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
        share = max(_NEWEST_SHARE, 1.0 / self._curves) if self.known else 1.0
        self.chain = _mix(self.chain, deep, share)
        self.tree = _mix(self.tree, wide, share)

    def correct(self, ratio: float) -> None:
        """Follows a change of calibration, which values the drafts seen before it `ratio` times as high as then."""
        ratio = min(_LARGEST_CORRECTION, max(1.0 / _LARGEST_CORRECTION, ratio))
        self._correction *= ratio

    def _settle(self) -> None:
        """Applies the outstanding correction; this is put off until the curves are read."""
        if self._correction != 1.0:
            self.chain = _scaled(self.chain, self._correction)
            self.tree = _scaled(self.tree, self._correction)
            self._correction = 1.0

    def expected(self, nodes: int, slots: int, branching: bool) -> float:
        """The accepted tokens to expect from verifying `nodes` nodes of a draft of `slots` slots."""
        self._settle()
        if not branching:
            return _between(self.chain, min(nodes, slots))
        return _between(self.tree, nodes) * _reach(self.chain, nodes, slots)

    def _whole_chain(self, draft: DraftCurves, proposals: int) -> tuple[float, ...]:
        """The curve of a drafted chain, continued to the full block if fewer slots were drafted.

        The continuation follows the shape of earlier curves. It must not follow the mean of this chain, because a
        chain that did well so far may have been lucky; only the very first chain has nothing else to follow.
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


class DepthGains:
    """What drafting deeper has been worth lately, per option of slots: tokens beyond the price of verifying them."""

    def __init__(self, source: DepthGains | None = None) -> None:
        self._gains: dict[int, float] = dict(source._gains) if source else {}

    def blend(self, worths: Mapping[int, float]) -> None:
        """Takes in one draft: `worths` says what it was worth if cut at each number of slots, shallowest first."""
        for (_, shallow), (slots, deep) in pairwise(worths.items()):
            gain = deep - shallow
            self._gains[slots] = self._gains.get(slots, gain) + _NEWEST_SHARE * (gain - self._gains.get(slots, gain))

    def gain(self, slots: int, untried: float) -> float:
        """The gain of drafting `slots` over the next shallower option; `untried` if that depth was never drafted."""
        return self._gains.get(slots, untried)


class BoundedRatio:
    """A slowly moving ratio of two sums that stays within bounds."""

    def __init__(self, value: float, least: float, most: float) -> None:
        self._sums = (value * _RATIO_PRIOR, _RATIO_PRIOR)
        self._least, self._most = least, most

    def add(self, above: float, below: float) -> None:
        self._sums = (self._sums[0] * _RATIO_KEEP + above, self._sums[1] * _RATIO_KEEP + below)

    @property
    def value(self) -> float:
        return min(self._most, max(self._least, self._sums[0] / self._sums[1]))


def assumed_chain(slots: int) -> list[float]:
    """The survival probabilities that are assumed for a chain of a drafter without any record."""
    return [_UNKNOWN_CHANCE ** (slot + 1) for slot in range(slots)]


def assumed_gains(proposals: int) -> ExpectedGains:
    """The gains that are assumed for a drafter without any record."""
    gains = ExpectedGains()
    gains.blend(DraftCurves.of(assumed_chain(proposals), ()), proposals)
    return gains


def _curve(survival: Sequence[float]) -> tuple[float, ...]:
    sums = list(accumulate(survival)) or [0.0]
    inside = bisect_right(SIZES, len(sums))
    return (*[sums[size - 1] for size in SIZES[:inside]], *[sums[-1]] * (len(SIZES) - inside))


def _scaled(curve: Sequence[float], ratio: float) -> tuple[float, ...]:
    """The curve times a ratio, but never more tokens than nodes."""
    values = [value * ratio for value in curve]
    return tuple([value if value < size else size for size, value in zip(SIZES, values, strict=False)])


def _mix(old: Sequence[float], new: Sequence[float], share: float) -> tuple[float, ...]:
    return tuple([a + share * (b - a) for a, b in zip(old, new, strict=True)]) if old else tuple(new)


def _reach(chain: Sequence[float], nodes: int, slots: int) -> float:
    """The share of a tree's gain that is left if it may only be `slots` deep, taken from what is left of a chain's."""
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
