"""What the device knows of the sequences that decode: lengths, pages, settings and wishes, one column for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from slipstream.kernels.gpu.growth import CALIBRATION_WORDS, Wishes, calibration_line
from slipstream.kernels.gpu.sampling import Settings
from slipstream.speculative.calibration import Calibration
from slipstream.types import SamplingParams

_STAGES = 3  # a copy may still wait behind two steps when the next one is prepared


@dataclass(frozen=True, slots=True)
class Decoding:
    """One sequence as the device needs it; `anchor` is its last token, which has not been through the target."""

    length: int
    anchor: int
    pages: Sequence[int]
    sampling: SamplingParams
    share_noise: bool


@dataclass(frozen=True, slots=True)
class Wish:
    """What one sequence proposes in a step: at most `nodes` drafted tokens no deeper than `depth`."""

    nodes: int = 0
    depth: int = 0
    shape: int = 0  # CHAIN, TREE or SEEDED_TREE
    calibration: Calibration | None = None


class DecodeState:
    """Tensors that graphs read and, as they commit, move on; the host writes them when the batch changes."""

    def __init__(self, most_sequences: int, most_pages: int, scratch_page: int, device: torch.device) -> None:
        self._scratch_page = scratch_page
        self._pinned = device.type == "cuda"
        self._most = most_sequences
        self.length = torch.zeros(most_sequences, dtype=torch.int32, device=device)
        self.pages = torch.full((most_sequences, most_pages), scratch_page, dtype=torch.int32, device=device)
        self.settings = Settings.empty(most_sequences, device)
        self.wishes = Wishes.empty(most_sequences, device)
        self._stages = cycle([self._stage() for _ in range(_STAGES)])
        self._wished: list[Wish] | None = None

    def _stage(self) -> tuple[Tensor, Tensor]:
        numbers = torch.zeros(3, self._most, dtype=torch.int32, pin_memory=self._pinned)
        lines = torch.zeros(self._most, CALIBRATION_WORDS, dtype=torch.float64, pin_memory=self._pinned)
        return numbers, lines

    def load(self, sequences: Sequence[Decoding]) -> None:
        """Takes over a batch; columns beyond it read and write the scratch page only."""
        pages = torch.full(self.pages.shape, self._scratch_page, dtype=torch.int32)
        for column, each in enumerate(sequences):
            pages[column, : len(each.pages)] = torch.tensor(each.pages, dtype=torch.int32)
        self.pages.copy_(pages)
        settings = self.settings
        columns = (
            (self.length, [each.length for each in sequences], 0),
            (self.wishes.anchors, [each.anchor for each in sequences], 0),
            (settings.temperature, [each.sampling.temperature for each in sequences], 0.0),
            (settings.seed, [each.sampling.seed for each in sequences], 0),
            (settings.top_k, [each.sampling.top_k for each in sequences], 0),
            (settings.top_p, [each.sampling.top_p for each in sequences], 1.0),
            (settings.min_p, [each.sampling.min_p for each in sequences], 0.0),
            (settings.shared, [int(each.share_noise) for each in sequences], 0),
        )
        for tensor, numbers, empty in columns:
            tensor.copy_(torch.tensor([*numbers, *[empty] * (self._most - len(numbers))], dtype=tensor.dtype))
        self._wished = None

    def wish(self, wishes: Sequence[Wish]) -> None:
        """What the sequences propose from the next step on; costs nothing where nothing has changed."""
        if self._wished == wishes and all(wish.calibration is None for wish in wishes):
            return
        self._wished = list(wishes)
        numbers, lines = next(self._stages)
        numbers.zero_()
        numbers[0] = -1  # a column without a sequence
        for column, wish in enumerate(wishes):
            numbers[0, column], numbers[1, column], numbers[2, column] = wish.nodes, wish.depth, wish.shape
            lines[column] = calibration_line(wish.calibration.table() if wish.calibration is not None else None)
        own = self.wishes
        for tensor, stage in ((own.nodes, numbers[0]), (own.depth, numbers[1]), (own.shape, numbers[2])):
            tensor.copy_(stage, non_blocking=True)
        own.calibration.copy_(lines, non_blocking=True)

    def clear(self) -> None:
        """No sequence at all: what runs now (a warm-up) touches the scratch page only."""
        self.load([])
        self.wish([])

    def snapshot(self) -> list[Tensor]:
        """What sequences are loaded, to be restored."""
        return [tensor.clone() for tensor in self._sequence_tensors()]

    def restore(self, kept: list[Tensor]) -> None:
        for tensor, old in zip(self._sequence_tensors(), kept, strict=True):
            tensor.copy_(old)
        self._wished = None

    def _sequence_tensors(self) -> list[Tensor]:
        settings = self.settings
        return [
            self.length, self.pages, self.wishes.anchors, settings.temperature, settings.seed, settings.top_k,
            settings.top_p, settings.min_p, settings.shared,
        ]
