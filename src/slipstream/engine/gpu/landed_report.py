"""What a step did, as the host reads it: whole columns at a time, and proposals only where something was drafted."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.gpu.step_report import Report
from slipstream.types import Proposal, TokenOut, Verdict

_Whole = NDArray[np.int32]


class ReportCopy:
    """A report on the host; used again a few steps later, so whatever is wanted of it is taken when it lands."""

    def __init__(self, sequences: int, each: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._report = Report(sequences, each, torch.device("cpu"), pinned=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        report, shape = self._report, (sequences, each)
        self.each = each
        self.tokens: _Whole = report.tokens[: sequences * each].view(shape).numpy()
        self.parents: _Whole = report.parents.view(shape).numpy()
        self.chances: NDArray[np.float32] = report.chances.view(shape).numpy()
        self.survivals: NDArray[np.float32] = report.survivals.view(shape).numpy()
        self.chosen: _Whole = report.chosen.view(shape).numpy()
        self.counts: _Whole = report.counts.numpy()
        self.broken: _Whole = report.broken.numpy()
        self.taken: _Whole = report.taken.numpy()
        self.failed: _Whole = report.failed.numpy()
        self.path: _Whole = report.path.numpy()
        self.kept: _Whole = report.kept.numpy()

    def begin(self, report: Report) -> None:
        self._report.flat.copy_(report.flat, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        """Until it is there."""
        if self._done is not None:
            self._done.synchronize()


class Landing:
    """What a step did for each of its sequences, by their places in the batch.

    It is good until its copy is used again; whatever few ask for is not unpacked for all.
    """

    def __init__(self, copy: ReportCopy, sequences: int) -> None:
        here, each = slice(0, sequences), copy.each
        self._copy = copy
        self.nodes: list[int] = copy.counts[here].tolist()
        self.drafted = max(self.nodes) > 0
        self.failed: list[int] = copy.failed[here].nonzero()[0].tolist()  # columns where the target gave no number
        self.broken: list[int] = copy.broken[here].nonzero()[0].tolist()  # columns where the drafter gave none
        self._chosen: list[list[int]] = copy.chosen[here].tolist() if self.failed else []
        self.taken: list[int] = copy.taken[here].tolist()  # rows that stay, and so the tokens that come
        if not self.drafted:
            self._anchors: list[int] = copy.tokens[here, 0].tolist()
            self._next: list[int] = copy.kept[here, 0].tolist()
            return
        self._tokens: list[list[int]] = copy.tokens[here, :each].tolist()
        self._parents: list[list[int]] = copy.parents[here, :each].tolist()
        self._path: list[list[int]] = copy.path[here, :each].tolist()
        self._kept: list[list[int]] = copy.kept[here, :each].tolist()

    def proposal(self, column: int, chances: bool) -> Proposal:
        """What was verified, on demand with the drafter's own probabilities, which only learning needs."""
        used = self.nodes[column] + 1
        if not self.drafted:
            return _alone(self._anchors[column])
        tokens = self._tokens[column]
        if used <= 1:
            return _alone(tokens[0])
        own = tuple(self._copy.chances[column, :used].tolist()) if chances else ()
        return Proposal(tuple(tokens[:used]), tuple(self._parents[column][:used]), own)

    def outcome(self, column: int) -> tuple[Verdict, list[TokenOut]]:
        """The path that stays, and the tokens it leads to."""
        if not self.drafted:
            token = self._next[column]
            return _bonus(token), [_own(token)]
        own, end = self._kept[column], self.taken[column]
        if end == 1:
            return _bonus(own[0]), [_own(own[0])]
        verdict = Verdict(tuple(self._path[column][:end]), tuple(own[:end]))
        last = max(0, end - 1)
        return verdict, [*map(_drafted, own[:last]), *map(_own, own[last:end])]

    def parents(self, column: int) -> list[int]:
        return self._parents[column][: self.nodes[column] + 1]

    def survivals(self, column: int) -> list[float]:
        """How likely every row was to be kept, as far as the calibration knew."""
        survivals: list[float] = self._copy.survivals[column, : self.nodes[column] + 1].tolist()
        return survivals

    def chosen(self, column: int) -> list[int]:
        """The target's choice after every row, of a sequence that has failed: its verdict here says nothing."""
        return self._chosen[column][: self.nodes[column] + 1]


# a plain step is nothing but its anchor and one token, so that each of these is made once per token of the vocabulary
@cache
def _alone(anchor: int) -> Proposal:
    return Proposal((anchor,), (-1,), (1.0,))


@cache
def _bonus(token: int) -> Verdict:
    return Verdict((0,), (token,))


@cache
def _own(token: int) -> TokenOut:
    return TokenOut(token)


@cache
def _drafted(token: int) -> TokenOut:
    return TokenOut(token, drafted=True)
