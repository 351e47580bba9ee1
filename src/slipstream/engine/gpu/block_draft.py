"""The draft of a device step: a block per sequence, and the likeliest tokens of the slots that its rows can reach."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.cache.gpu.device_pools import GpuPools
from slipstream.kernels.gpu.device_rows import DeviceRows, padded_rows
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.token_choice import RankingScratch, SamplingSettings
from slipstream.kernels.gpu.tree_growth import HeadScores, Wishes
from slipstream.models.gpu.device_models import GpuDrafter

CANDIDATES = 16  # tokens per slot that may enter a tree; lower ranks hardly ever do, and each costs ranking time


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens of every slot, best first, and their log-probabilities."""

    tokens: Tensor  # int32 [sequences, slots, K]
    scores: Tensor  # fp32

    @classmethod
    def empty(cls, sequences: int, slots: int, count: int, device: torch.device) -> Candidates:
        """Returns candidates that no draft has filled; their scores are minus infinity, so no tree grows from them."""
        tokens = torch.zeros(sequences, slots, count, dtype=torch.int32, device=device)
        return cls(tokens, torch.full((sequences, slots, count), -torch.inf, device=device))

    def behind(self, first: int) -> Candidates:
        return Candidates(self.tokens[:, first:], self.scores[:, first:])

    @property
    def shape(self) -> tuple[int, int, int]:
        sequences, slots, count = self.tokens.shape
        return sequences, slots, count


class BlockDraft:
    """One pass of the drafter for all sequences of a step; `rows` are its blocks.

    A tree of n nodes is at most n deep. If a step has few rows for each of many sequences, the later slots of a block
    therefore need not pass the output matrix. That matrix is most of what a block costs.
    """

    def __init__(
        self,
        kernels: GpuKernels,
        drafter: GpuDrafter,
        rows: DeviceRows,
        most_nodes: int,
        pools: GpuPools,
        settings: SamplingSettings,
        wishes: Wishes,
    ) -> None:
        self._kernels = kernels
        self._drafter = drafter
        self._rows = rows
        self._pools = pools
        self._settings = settings
        self._wishes = wishes
        self._blocks: Tensor  # hidden rows [sequences, block, width]
        device, first = pools.device, drafter.first_slot
        slots = min(drafter.proposals, most_nodes)
        asked = padded_rows(rows.sequences * slots)
        self._picks = asked < padded_rows(rows.rows)
        if not self._picks:
            slots, asked = drafter.proposals, 0
        self._slots = slice(first, first + slots)
        self._each = slots if self._picks else drafter.block_size
        # The hidden rows of the picked slots, and padding rows after them.
        self._hidden = torch.zeros(asked, drafter.width, dtype=torch.bfloat16, device=device)
        self._positions = torch.zeros(rows.sequences, slots, dtype=torch.int32, device=device)
        count = drafter.candidate_limit or CANDIDATES
        self._found = Candidates.empty(rows.sequences, self._each, count, device)
        self._ranking = RankingScratch.empty(rows.sequences * self._each, drafter.vocab_size, count, device)
        self.candidates = self._found if self._picks else self._found.behind(first)
        self.head_scores: HeadScores | None = None
        if drafter.heads is not None:
            # Every confidence is enough here: a request with `min_confidence` runs on the host, not in device steps.
            anything = torch.zeros(rows.sequences, device=device)
            confident = drafter.heads.trust is not None
            self.head_scores = HeadScores.empty(*self.candidates.shape, confident, anything)

    def run(self) -> None:
        """Runs the blocks after the anchors and finds the likeliest tokens of their slots."""
        drafter, rows, pools = self._drafter, self._rows, self._pools
        drafter.lay_out(rows, self._wishes.anchors, pools.page_tokens)
        hidden = drafter.run(rows, pools.draft_keys, pools.draft_values)
        self._blocks = hidden[: rows.rows].view(rows.sequences, drafter.block_size, -1)
        positions, asked = rows.positions[: rows.rows], rows.rows
        if self._picks:
            asked = rows.sequences * self._positions.shape[1]
            chosen = self._blocks[:, self._slots]
            self._hidden[:asked].view_as(chosen).copy_(chosen)
            self._positions.copy_(positions.view(rows.sequences, -1)[:, self._slots])
            hidden, positions = self._hidden, self._positions.flatten()
        found = self._found
        self._kernels.top_candidates(
            drafter.logits(hidden)[:asked],
            positions,
            self._settings,
            self._each,
            1 - drafter.first_slot,
            found.tokens.flatten(0, 1),
            found.scores.flatten(0, 1),
            self._ranking,
        )

    def ask_heads(self) -> None:
        """Scores each candidate with the drafter's heads, once for each candidate that may stand before it."""
        heads = self._drafter.heads
        assert heads is not None
        self._kernels.score_heads(
            heads,
            self._blocks[:, self._slots],
            self.candidates.tokens,
            self._wishes.anchors,
            self._settings.temperature,
            self.head_scores,
        )
