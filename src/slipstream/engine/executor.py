"""What the engine asks of a device: one forward over rows, and on a GPU whole decoding steps.

There are two executors, `cpu/cpu_executor.py` and `gpu/gpu_executor.py`. Neither knows requests or text, and the engine
knows no device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from slipstream.cache.sequence import PageMemory, SequenceState
from slipstream.engine.variants import DraftVariant, DraftVariants
from slipstream.models.decoder import Decoder
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.costs import CostTable
from slipstream.speculative.draft import BlockDrafter
from slipstream.speculative.estimate import Estimate
from slipstream.types import Proposal, SamplingParams, TokenOut, Verdict


def bucket(count: int, least: int = 1) -> int:
    """The power of two that device steps are made for: one shape serves all counts up to it."""
    return max(least, 1 << (count - 1).bit_length())


class RowWork(NamedTuple):
    """Rows of one sequence from position `start` on: a stretch of known tokens, or an anchor and its drafts."""

    state: SequenceState
    start: int
    tokens: Sequence[int]
    logit_rows: int  # how many of the last rows need logits
    proposal: Proposal | None = None  # set if the rows are a proposal's

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def positions(self) -> Sequence[int]:
        tree = self.tree
        if tree is None:
            return range(self.start, self.start + len(self.tokens))
        return [self.start + depth for depth in tree.depths]

    @property
    def tree(self) -> Proposal | None:
        """The proposal, if its rows do not follow each other."""
        return self.proposal if self.proposal is not None and self.proposal.branching else None


class ForwardResult(NamedTuple):
    """Logits per work item on the host, and the taps from which draft context is written."""

    works: Sequence[RowWork]
    logits: list[Tensor]
    taps: Tensor | None
    starts: list[int]  # first row of each work item among the taps
    written: frozenset[int] = frozenset()  # work items whose draft context the forward has written itself


@dataclass(frozen=True, slots=True)
class BatchColumn:
    """One sequence of a device step; `anchor` is its last token, which has not been through the target."""

    length: int
    anchor: int
    pages: Sequence[int]
    sampling: SamplingParams
    share_noise: bool
    slots: tuple[int, int] | None = None  # if the target is recurrent: the slot of the state, and that of the next one


@dataclass(frozen=True, slots=True)
class Wish:
    """What one sequence proposes in a device step: at most `nodes` drafted tokens.

    Tokens of the drafter are no deeper than `depth`. With `text`, a tree also takes nodes from the sequence's own text.
    """

    nodes: int = 0
    depth: int = 0
    shape: int = 0  # CHAIN, TREE or SEEDED_TREE
    estimate: Estimate | None = None
    text: bool = False


EMPTY_COLUMN = BatchColumn(0, 0, (), SamplingParams(), share_noise=False)
NO_SEQUENCE = Wish(nodes=-1)  # the wish of a column whose sequence has left


class Launched(Protocol):
    """A device step that is under way."""

    @property
    def rows(self) -> int:
        """Rows of each sequence."""

    @property
    def captured(self) -> bool:
        """Whether a graph was captured for this step, so that its duration says nothing."""


class Landed(Protocol):
    """What a device step did for each of its sequences, by column."""

    nodes: list[int]  # drafted tokens that were verified, by column
    taken: list[int]  # rows that stay, by column
    failed: list[int]  # columns whose target gave logits that are not numbers
    broken: list[int]  # columns whose drafter gave logits that are not numbers
    drafted: bool  # whether any column verified a draft

    def proposal(self, column: int, claimed: bool) -> Proposal: ...
    def outcome(self, column: int) -> tuple[Verdict, list[TokenOut]]: ...
    def chosen(self, column: int) -> list[int]: ...


class DeviceSteps(Protocol):
    """Whole decoding steps on the device: draft, tree, verify, accept and commit without the host."""

    @property
    def most_rows(self) -> int:
        """Rows of a step at most, over all its sequences."""

    @property
    def most_rows_each(self) -> int:
        """Rows of one sequence at most."""

    def serves(self, variant: DraftVariant) -> bool:
        """Whether this variant of the drafter can draft without asking the host between its tokens."""

    def widths(self, sequences: int) -> list[int]:
        """Rows of each sequence that drafting steps of a batch come in."""

    def ready(self, sequences: int, rows: int, variant: DraftVariant | None) -> bool:
        """Whether a drafting step of this shape runs without being captured first."""

    def launch(
        self,
        batch: tuple[Hashable, ...],
        describe: Callable[[], Sequence[BatchColumn]],
        wishes: Sequence[Wish],
        variant: DraftVariant | None,
    ) -> Launched:
        """Starts a step; `describe` is called only if the device does not hold this batch yet."""

    def land(self, launched: Any) -> Landed:
        """Waits for a step: the only place where the host waits for the device."""

    def forget_batch(self) -> None:
        """Has the next launch load its batch again, because the lengths on the device are out of date."""


class Executor(Protocol):
    """One device with a loaded pair and its pools."""

    @property
    def target(self) -> Decoder: ...
    @property
    def variants(self) -> DraftVariants: ...
    @property
    def memory(self) -> PageMemory:
        """The pools behind the pages."""

    @property
    def pages(self) -> int: ...
    @property
    def exact(self) -> bool:
        """Whether speculative text equals plain text to the bit."""

    @property
    def shares_generated(self) -> bool:
        """Whether decoding and prefill sum in the same order, so that generated pages may serve later prompts."""

    @property
    def spare_positions(self) -> int:
        """Positions that a step launched ahead may write after a sequence's last token."""

    @property
    def device_steps(self) -> DeviceSteps | None:
        """Whole decoding steps; None where the host runs every phase."""

    def forward(self, works: Sequence[RowWork]) -> ForwardResult:
        """One pass of the target over all rows of all sequences."""

    def blocks(self, drafter: DFlashDrafter) -> BlockDrafter:
        """A drafter that drafts over this executor's pools."""

    def forget(self, variant: DraftVariant) -> None:
        """Drops what is kept for a variant that was removed."""

    def measure_costs(self) -> CostTable:
        """Times steps of several widths, and drafts."""

    def prepare_batches(self) -> None:
        """Prepares now what the first steps with several sequences would otherwise wait for."""
