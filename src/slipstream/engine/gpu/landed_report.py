"""The results of a device step on the host.

The host reads the values of all columns at once, and it unpacks proposals only if the step drafted something.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from slipstream.engine.gpu.step_report import Report
from slipstream.types import Proposal, Source, TokenOut, Verdict

_Whole = NDArray[np.int32]


class ReportCopy:
    """A step's report in host memory. A later step writes over it, so its values must be read when its step lands."""

    def __init__(self, sequences: int, each: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._report = Report(sequences, each, torch.device("cpu"), pinned=on_gpu)
        self._done = torch.cuda.Event() if on_gpu else None
        report, shape = self._report, (sequences, each)
        self.each = each
        self.tokens: _Whole = report.tokens[: sequences * each].view(shape).numpy()
        self.parents: _Whole = report.parents.view(shape).numpy()
        self.claims: NDArray[np.float32] = report.claims.view(shape).numpy()
        self.chosen: _Whole = report.chosen.view(shape).numpy()
        self.counts: _Whole = report.counts.numpy()
        self.broken: _Whole = report.broken.numpy()
        self.texts: _Whole = report.texts.numpy()
        self.taken: _Whole = report.taken.numpy()
        self.failed: _Whole = report.failed.numpy()
        self.path: _Whole = report.path.numpy()
        self.kept: _Whole = report.kept.numpy()

    def begin(self, report: Report) -> None:
        """Queues the copy of a report after the step that writes it; the host does not wait."""
        self._report.flat.copy_(report.flat, non_blocking=True)
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        """Blocks until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()


class Landing:
    """What a step did for each of its sequences, by the sequence's column in the batch.

    A landing is valid until its copy is written over. Values that only a few sequences need are unpacked when they are
    asked for, not for all columns.
    """

    def __init__(self, copy: ReportCopy, sequences: int) -> None:
        here, each = slice(0, sequences), copy.each
        self._copy = copy
        self.nodes: list[int] = copy.counts[here].tolist()
        self.drafted = max(self.nodes) > 0
        self.failed: list[int] = (
            copy.failed[here].nonzero()[0].tolist()
        )  # columns whose target logits are NaN or infinite
        self.broken: list[int] = (
            copy.broken[here].nonzero()[0].tolist()
        )  # columns whose draft logits are NaN or infinite
        self._chosen: list[list[int]] = copy.chosen[here].tolist() if self.failed else []
        self.taken: list[int] = copy.taken[here].tolist()  # kept rows by column; each of them yields one token
        if not self.drafted:
            self._anchors: list[int] = copy.tokens[here, 0].tolist()
            self._next: list[int] = copy.kept[here, 0].tolist()
            return
        self._tokens: list[list[int]] = copy.tokens[here, :each].tolist()
        self._texts: list[int] = copy.texts[here].tolist()
        self._parents: list[list[int]] = copy.parents[here, :each].tolist()
        self._path: list[list[int]] = copy.path[here, :each].tolist()
        self._kept: list[list[int]] = copy.kept[here, :each].tolist()

    def proposal(self, column: int, claimed: bool) -> Proposal:
        """Returns what was verified; `claimed` adds the sources' claims, which only learning needs."""
        used = self.nodes[column] + 1
        if not self.drafted:
            return _alone(self._anchors[column])
        tokens = self._tokens[column]
        if used <= 1:
            return _alone(tokens[0])
        texts, claims = self._texts[column], self._copy.claims[column, :used]
        if claimed and texts:
            # A claim of a text, such as 9/10, may lie on a border of the estimate's bins, and rounding to fp32 may put
            # it below that border. The next larger number is not below.
            claims = np.append(claims[:-texts], np.nextafter(claims[-texts:], np.float32(1.0)))
        own = tuple(claims.tolist()) if claimed else ()
        sources = (Source.DRAFTER,) * (used - texts) + (Source.TEXT,) * texts if texts else ()
        return Proposal(tuple(tokens[:used]), tuple(self._parents[column][:used]), own, sources)

    def outcome(self, column: int) -> tuple[Verdict, list[TokenOut]]:
        """Returns the path that is kept and the tokens that it yields."""
        if not self.drafted:
            token = self._next[column]
            return _bonus(token), [_own(token)]
        own, end = self._kept[column], self.taken[column]
        if end == 1:
            return _bonus(own[0]), [_own(own[0])]
        verdict = Verdict(tuple(self._path[column][:end]), tuple(own[:end]))
        last = max(0, end - 1)
        return verdict, [*map(_drafted, own[:last]), *map(_own, own[last:end])]

    def chosen(self, column: int) -> list[int]:
        """Returns the target's choice after every row of a failed sequence, whose verdict here means nothing."""
        return self._chosen[column][: self.nodes[column] + 1]


# A plain step has an anchor and one new token and nothing else, so each of these objects is made once per token of the
# vocabulary and then shared.
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
