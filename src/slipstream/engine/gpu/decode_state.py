"""The device's view of the sequences that decode: lengths, pages, sampling settings and wishes, one column each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from slipstream.engine.executor import NO_SEQUENCE, BatchColumn, Wish
from slipstream.kernels.gpu.token_choice import SamplingSettings
from slipstream.kernels.gpu.tree_growth import CALIBRATION_WORDS, Wishes, write_calibration

# Host buffers in rotation. When the next copy is prepared, two older ones may still wait behind launched steps; with
# fewer buffers, the host would write over numbers that the device has not fetched yet.
_STAGES = 3


class DecodeState:
    """Tensors that captured graphs read and that their commits advance; the host writes them when the batch changes."""

    def __init__(
        self, most_sequences: int, most_pages: int, scratch_page: int, device: torch.device, scratch_slot: int = 0
    ) -> None:
        self._scratch_page = scratch_page
        self._scratch_slots = scratch_slot, scratch_slot
        self._pinned = device.type == "cuda"
        self._most = most_sequences
        self.length = torch.zeros(most_sequences, dtype=torch.int32, device=device)
        self.pages = torch.full((most_sequences, most_pages), scratch_page, dtype=torch.int32, device=device)
        self.slots = torch.full((2, most_sequences), scratch_slot, dtype=torch.int32, device=device)
        self.settings = SamplingSettings.empty(most_sequences, device)
        # These rows lie side by side, so that one copy sends all of them.
        self._wanted = torch.zeros(4, most_sequences, dtype=torch.int32, device=device)
        nodes, depth, shape, text = self._wanted
        self.wishes = replace(Wishes.empty(most_sequences, device), nodes=nodes, depth=depth, shape=shape, text=text)
        self._stages = cycle([self._stage() for _ in range(_STAGES)])
        self._loads = cycle([list(map(self._pinned_twin, self._sequence_tensors())) for _ in range(_STAGES)])
        self._wished: Sequence[Wish] | None = None

    def _stage(self) -> tuple[Tensor, Tensor]:
        numbers = torch.zeros(4, self._most, dtype=torch.int32, pin_memory=self._pinned)
        lines = torch.zeros(self._most, CALIBRATION_WORDS, dtype=torch.float64, pin_memory=self._pinned)
        return numbers, lines

    def _pinned_twin(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)

    def load(self, sequences: Sequence[BatchColumn]) -> None:
        """Loads a batch without waiting for the device; columns without a sequence use the scratch page only."""
        stages = next(self._loads)
        length, pages, slots, *numbers = (stage.numpy() for stage in stages)
        count, sampling = len(sequences), [each.sampling for each in sequences]
        length[:], pages[:], slots[:] = 0, self._scratch_page, self._scratch_slots[0]
        length[:count] = [each.length for each in sequences]
        for column, each in enumerate(sequences):
            pages[column, : len(each.pages)] = each.pages
            slots[:, column] = each.slots or self._scratch_slots
        columns = (
            ([each.anchor for each in sequences], 0),
            ([params.temperature for params in sampling], 0.0),
            ([params.seed for params in sampling], 0),
            ([params.top_k for params in sampling], 0),
            ([params.top_p for params in sampling], 1.0),
            ([params.min_p for params in sampling], 0.0),
            ([each.share_noise for each in sequences], False),
        )
        for stage, (given, empty) in zip(numbers, columns, strict=True):
            stage[:count], stage[count:] = given, empty
        for tensor, ready in zip(self._sequence_tensors(), stages, strict=True):
            tensor.copy_(ready, non_blocking=True)
        self._wished = None

    def wish(self, wishes: Sequence[Wish]) -> None:
        """Sets what the sequences propose from the next step on; if nothing has changed, nothing is sent.

        An estimate changes with nearly every step, so it is sent again only if its wish is a new object.
        """
        if wishes is self._wished:
            return
        known, self._wished = self._wished, wishes
        changed: Sequence[Wish] = wishes
        if known is not None and len(known) == len(wishes):
            changed = [new for old, new in zip(known, wishes, strict=True) if new is not old]
        if known == wishes and all(wish.estimate is None for wish in changed):
            return
        numbers, lines = next(self._stages)
        count, columns = len(wishes), numbers.numpy()
        columns[0], columns[1:] = NO_SEQUENCE.nodes, 0
        columns[:, :count] = (
            [wish.nodes for wish in wishes],
            [wish.depth for wish in wishes],
            [wish.shape for wish in wishes],
            [wish.text for wish in wishes],
        )
        self._wanted.copy_(numbers, non_blocking=True)
        if all(wish is NO_SEQUENCE for wish in changed):
            return  # Sequences have only left the batch; the estimates of the others are on the device already.
        start, step = lines.data_ptr(), 8 * CALIBRATION_WORDS
        for column, wish in enumerate(wishes):
            table = wish.estimate.table() if wish.estimate is not None else None
            write_calibration(start + column * step, table)
        self.wishes.calibration[:count].copy_(lines[:count], non_blocking=True)

    def clear(self) -> None:
        """Unloads all sequences, so that a step that runs now (a warm-up) touches the scratch page only."""
        self.load([])
        self.wish([])

    def snapshot(self) -> list[Tensor]:
        """Returns copies of the loaded sequences' tensors, for `restore`."""
        return [tensor.clone() for tensor in self._sequence_tensors()]

    def restore(self, kept: list[Tensor]) -> None:
        """Puts back what `snapshot` returned; wishes have to be sent again."""
        for tensor, old in zip(self._sequence_tensors(), kept, strict=True):
            tensor.copy_(old)
        self._wished = None

    def _sequence_tensors(self) -> list[Tensor]:
        settings = self.settings
        return [
            self.length,
            self.pages,
            self.slots,
            self.wishes.anchors,
            settings.temperature,
            settings.seed,
            settings.top_k,
            settings.top_p,
            settings.min_p,
            settings.shared,
        ]
