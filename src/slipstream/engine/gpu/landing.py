"""What a step did, as the host reads it: whole columns at a time, and proposals only where something was drafted."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.gpu.report import Report
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
    """What a step did for each of its sequences, by their places in the batch."""

    def __init__(self, copy: ReportCopy, sequences: int) -> None:
        here, each = slice(0, sequences), copy.each
        self.nodes: list[int] = copy.counts[here].tolist()
        self.drafted = max(self.nodes) > 0
        self.failed: list[int] = copy.failed[here].nonzero()[0].tolist()  # whose target gave no number after some row
        self.broken: list[int] = copy.broken[here].nonzero()[0].tolist()  # whose drafter gave none
        self._chosen: list[list[int]] = copy.chosen[here].tolist() if self.failed else []
        self.proposals: list[Proposal] = list(map(_alone, copy.tokens[here, 0].tolist()))
        if not self.drafted:
            kept: list[int] = copy.kept[here, 0].tolist()
            self.verdicts = list(map(_bonus, kept))
            self.tokens = [[token] for token in map(_own, kept)]
            return
        rows = [
            part[here, :each].tolist() for part in (copy.tokens, copy.parents, copy.chances, copy.path, copy.kept)
        ]
        self.verdicts, self.tokens = [], []
        taken: list[int] = copy.taken[here].tolist()
        for place, (tokens, parents, chances, path, own) in enumerate(zip(*rows, strict=True)):
            used, end = self.nodes[place] + 1, taken[place]
            if used > 1:
                self.proposals[place] = Proposal(tuple(tokens[:used]), tuple(parents[:used]), tuple(chances[:used]))
            self.verdicts.append(_bonus(own[0]) if end == 1 else Verdict(tuple(path[:end]), tuple(own[:end])))
            self.tokens.append([*map(_drafted, own[: max(0, end - 1)]), *map(_own, own[max(0, end - 1) : end])])

    def chosen(self, place: int) -> list[int]:
        """The target's choice after every row, of a sequence that has failed: its verdict here says nothing."""
        return self._chosen[place][: self.nodes[place] + 1]


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
