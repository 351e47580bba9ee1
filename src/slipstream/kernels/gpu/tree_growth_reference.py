"""Does what `grow` does, in plain torch and Python, with a sorted list of open candidates instead of a vector."""

from __future__ import annotations

from bisect import insort

import torch
from torch import Tensor

from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.tree_growth import DRAFTER_FACTORS, Branches, Grown, HeadScores, TextDraft, Wishes
from slipstream.kernels.rows import CHAIN, TREE

_LOST_HEAD = -1  # a branch has this count of candidates if its head produced NaN or infinity
_UNKNOWN_SCORE = float("inf")


def grow_reference(
    tokens: Tensor, scores: Tensor, wishes: Wishes, heads: HeadScores | None, rows: DeviceRows, scratch_place: int,
    page_tokens: int, grown: Grown, branches: Branches, text: TextDraft | None = None,
) -> None:
    """Fills `branches`, `rows` (except base, earliest and pages) and `grown` from candidates and their scores.

    Candidates and scores are [sequences, slots, K].
    """
    _rank(scores, wishes.calibration, heads, branches)
    unknown = (scores.isnan() | (scores == _UNKNOWN_SCORE)).flatten(1).any(dim=1).tolist()
    rows.paths.zero_()
    for sequence in range(tokens.shape[0]):
        tree = _Tree(branches, sequence)
        wanted = int(wishes.nodes[sequence])
        limit, floor = min(wanted, rows.each - 1), float(wishes.floor[sequence])
        if wanted > 0 and not unknown[sequence]:
            tree.grow(limit, min(int(wishes.depth[sequence]), tokens.shape[1]), int(wishes.shape[sequence]), floor)
        own_tokens, anchor = tokens[sequence], int(wishes.anchors[sequence])
        places = zip(tree.depths, tree.origins, strict=True)
        tree.tokens = [int(own_tokens[depth - 1, origin]) for depth, origin in places]
        grown.texts[sequence] = 0
        if text is not None and wanted > 0 and not (unknown[sequence] or tree.broken):
            offered = slice(0, int(text.counts[sequence]))
            parts = (part[sequence, offered].tolist() for part in (text.tokens, text.claims, text.worths))
            grown.texts[sequence] = tree.add_text(list(zip(*parts, strict=True)), limit, floor)
        grown.broken[sequence] = int(wanted > 0 and (unknown[sequence] or tree.broken))
        rows_used = 0 if wanted < 0 else 1 if grown.broken[sequence] else len(tree.parents)
        _write(tree, rows_used, anchor, rows, sequence, scratch_place, page_tokens, grown)


def _rank(scores: Tensor, calibration: Tensor, heads: HeadScores | None, branches: Branches) -> None:
    plain = scores.double()[:, :, None, :]
    chance = plain.exp()
    lost = silent = torch.zeros_like(branches.counts, dtype=torch.bool)
    if heads is not None:
        rest = (1.0 - chance.sum(dim=-1, keepdim=True)).clamp_min(0.0)
        corrected = plain + heads.scale.double()[:, None, None, None] * heads.corrections.double()
        shift = corrected.amax(dim=-1, keepdim=True).clamp_min(0.0)
        weights = (corrected - shift).exp()
        chance = weights / (weights.sum(dim=-1, keepdim=True) + rest * (-shift).exp())
        lost = ~heads.corrections.isfinite().all(dim=-1)
    ranked, origins = chance.sort(dim=-1, descending=True, stable=True)
    possible = ranked > 0.0
    if heads is not None and heads.confidence is not None:
        sure = heads.confidence.double()[..., None]
        left = 1.0 - ranked[..., :1]
        share = torch.where(left > 0.0, (1.0 - sure) / left, 0.0)
        ranked = torch.cat((sure, torch.minimum(sure, ranked[..., 1:] * share)), dim=-1)
        silent = heads.confidence < heads.least_confidence[:, None, None]
        lost = lost | ~heads.confidence.isfinite()
    branches.claims.copy_(ranked)
    branches.origins.copy_(origins)
    for sequence, line in enumerate(calibration.cpu()):
        for slot in range(ranked.shape[1]):
            claimed = ranked[sequence, slot].cpu()
            worth = calibrated_reference(line, claimed, torch.full_like(claimed, slot + 1), int(DRAFTER_FACTORS.value))
            branches.worths[sequence, slot].copy_(worth)
    counts = torch.where(lost, _LOST_HEAD, possible.sum(dim=-1))
    branches.counts.copy_(torch.where(silent, 0, counts))


def calibrated_reference(line: Tensor, claimed: Tensor, depth: Tensor, factors: int) -> Tensor:
    """Returns what claims are worth at their depths; `factors` is where a calibration line keeps their factors."""
    known, least, most, depths = line[:4].tolist()
    if not known:
        return claimed
    claims, levels = line[4:28].split((16, 8))
    claim = (claims <= claimed[..., None]).sum(dim=-1)
    place = claim * (int(depths) + 1) + (levels <= depth[..., None]).sum(dim=-1)
    return (claimed * line[factors + place]).clamp(least, most)


class _Tree:
    """The nodes of one sequence in the order in which they are added; row 0 is the anchor."""

    def __init__(self, branches: Branches, sequence: int) -> None:
        self._chances, self._worths, self._origins, self._counts = (
            part[sequence].tolist() for part in (branches.claims, branches.worths, branches.origins, branches.counts)
        )
        self._heads = branches.counts.shape[2] > 1
        self._open: list[tuple[float, int, int, int, int]] = []  # (-survival, order, parent, branch's line, rank)
        self._order = 0
        self.broken = False
        self.parents, self.depths, self.origins = [-1], [0], [0]
        self.claims, self.survivals = [1.0], [1.0]
        self.tokens: list[int] = []  # by row, once the drafter's part is grown; row 0 stands for the anchor

    def grow(self, nodes: int, depth: int, shape: int, floor: float) -> None:
        lines: list[int] = []
        if shape != TREE:
            while len(lines) < min(nodes, depth):
                row = len(lines)
                line = self._line(row)
                if self._possible(row, line) <= 0:
                    break
                lines.append(line)
                self._add(row, line, 0, self.survivals[row] * self._worths[row][line][0])
        if shape == CHAIN:
            return
        for row, line in enumerate(lines):
            self._offer(row, line, 1, self.survivals[row + 1])
        if shape == TREE or lines:
            self._open_below(len(lines), depth)
        while self._open and len(self.parents) <= nodes and -self._open[0][0] >= floor and not self.broken:
            negative, _, parent, line, rank = self._open.pop(0)
            self._add(parent, line, rank, -negative)
            self._offer(parent, line, rank + 1, -negative)
            self._open_below(len(self.parents) - 1, depth)

    def add_text(self, offered: list[tuple[int, float, float]], limit: int, floor: float) -> int:
        """Adds what the text offers (token, claim, worth) after the part of it that the tree has.

        If no row is free, a likelier token replaces the last node of the tree. Returns how many tokens were added.
        """
        here, reached, known = 0, 1.0, 0
        while known < len(offered):
            token, _, worth = offered[known]
            rows = range(1, len(self.parents))
            child = next((row for row in rows if self.parents[row] == here and self.tokens[row] == token), 0)
            if not child:
                break
            here, reached, known = child, max(reached * worth, self.survivals[child]), known + 1
        left = len(self.parents) - 1
        survivals: list[float] = []
        for _, _, worth in offered[known:]:
            value = reached * worth
            free = left + len(survivals) < limit
            if value < floor or not (free or (left > here and value > self.survivals[left])):
                break
            left -= not free
            survivals.append(value)
            reached = value
        for part in (self.parents, self.depths, self.claims, self.survivals, self.tokens):
            del part[left + 1 :]
        parent = here
        for (token, claim, _), survival in zip(offered[known:], survivals, strict=False):
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.claims.append(claim)
            self.survivals.append(survival)
            self.tokens.append(token)
            parent = len(self.parents) - 1
        return len(survivals)

    def _line(self, row: int) -> int:
        return self.origins[row] if self._heads and row else 0

    def _possible(self, row: int, line: int) -> int:
        count: int = self._counts[self.depths[row]][line]
        self.broken = self.broken or count == _LOST_HEAD
        return count

    def _add(self, parent: int, line: int, rank: int, survival: float) -> None:
        slot = self.depths[parent]
        self.parents.append(parent)
        self.depths.append(slot + 1)
        self.origins.append(self._origins[slot][line][rank])
        self.claims.append(self._chances[slot][line][rank])
        self.survivals.append(survival)

    def _offer(self, parent: int, line: int, rank: int, ceiling: float) -> None:
        slot = self.depths[parent]
        if rank < self._counts[slot][line]:
            own = self.survivals[parent] * self._worths[slot][line][rank]
            insort(self._open, (-min(own, ceiling), self._order, parent, line, rank))
            self._order += 1

    def _open_below(self, row: int, depth: int) -> None:
        if self.depths[row] < depth:
            line = self._line(row)
            if self._possible(row, line) > 0:
                self._offer(row, line, 0, self.survivals[row])


def _write(
    tree: _Tree, count: int, anchor: int, rows: DeviceRows, sequence: int, scratch_place: int, page_tokens: int,
    grown: Grown,
) -> None:
    first, base = sequence * rows.each, int(rows.base[sequence])
    own = slice(first, first + rows.each)
    rows.tokens[own], rows.positions[own], rows.places[own] = anchor, base, scratch_place
    grown.parents[own], grown.claims[own], grown.counts[sequence] = -1, 0.0, count - 1
    grown.survivals[own] = 0.0
    grown.claims[first] = grown.survivals[first] = 1.0
    for row in range(count):
        at, depth = first + row, tree.depths[row]
        if row:
            rows.tokens[at] = tree.tokens[row]
            rows.paths[at] = rows.paths[first + tree.parents[row]]
        rows.paths[at, depth] = row
        rows.positions[at] = base + depth
        page, offset = divmod(base + row, page_tokens)
        rows.places[at] = rows.pages[sequence, page] * page_tokens + offset
        grown.parents[at], grown.claims[at], grown.survivals[at] = (
            tree.parents[row], tree.claims[row], tree.survivals[row],
        )
