"""One whole decoding step as launches on the device: draft, grow, verify, choose, accept, commit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from slipstream.cache.gpu.device_pools import GpuPools
from slipstream.cache.gpu.device_states import device_tensors
from slipstream.engine.executor import bucket
from slipstream.engine.gpu.block_draft import CANDIDATES, BlockDraft, Candidates
from slipstream.engine.gpu.decode_state import DecodeState
from slipstream.engine.gpu.step_report import Report
from slipstream.errors import IntegrityError
from slipstream.kernels.gpu.commit import ContextRows, HeldTaps
from slipstream.kernels.gpu.delta_net_launch import DeviceStates, Replay
from slipstream.kernels.gpu.device_rows import LEAST_ROWS, DeviceRows
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.token_choice import RankingScratch, SamplingSettings
from slipstream.kernels.gpu.tree_growth import Branches, HeadScores, TextDraft, Wishes
from slipstream.models.gpu.device_models import GpuDrafter, GpuTarget
from slipstream.speculative.suffix_index import LONGEST_MATCH
from slipstream.speculative.text_drafts import MOST_TEXT_NODES

_WIDTHS = (2, 4, 8, 16, 32, 64)  # rows per sequence of a drafting step; each width that is used is a graph of its own
# Steps without drafts whose taps are held, and rows in all, before their draft context is written in one launch. With
# fewer, plain decoding reads the drafter's weights more often; with more, held taps take more memory.
MOST_HELD_TURNS, _MOST_HELD_ROWS = 16, 1024


def drafted_widths(sequences: int, most_rows: int) -> list[int]:
    """Returns the rows per sequence that drafting steps come in, if a step has at most `most_rows` rows in all."""
    # A step of fewer than LEAST_ROWS rows is padded to that number anyway, so such a width would save nothing.
    return [each for each in _WIDTHS if LEAST_ROWS <= sequences * each <= most_rows]


class DecodeStep:
    """The launches for `sequences` sequences with `each` rows.

    With a drafter, kept rows become draft context; `drafting` says whether anything is proposed in this step, by the
    drafter if there is one and by the texts of the sequences. If nothing is, the context is not read soon. The taps of
    several such steps are `held` and written together, so that the drafter's weights are read once for all of them.
    """

    def __init__(
        self,
        kernels: GpuKernels,
        state: DecodeState,
        pools: GpuPools,
        target: GpuTarget,
        sequences: int,
        each: int,
        drafter: GpuDrafter | None,
        drafting: bool,
    ) -> None:
        if sequences > len(state.length):  # kernels would read beyond the end of the state's tensors
            raise IntegrityError(f"a step of {sequences} sequences is asked for, with room for {len(state.length)}")
        device, vocabulary = pools.device, target.vocab_size
        self._kernels = kernels
        self._pools = pools
        self._target = target
        self.drafter = drafter
        self.sequences = sequences
        self.each = each
        self._settings = SamplingSettings(
            *(getattr(state.settings, each.name)[:sequences] for each in fields(SamplingSettings))
        )
        self._wishes = Wishes(*(getattr(state.wishes, each.name)[:sequences] for each in fields(Wishes)))
        self.report = Report(sequences, each, device)
        rows = DeviceRows.empty("tree", sequences, each, 1, device, pools.scratch_place)
        self._rows = _over(state, replace(rows, tokens=self.report.tokens))
        self._grown, self._chosen, self._outcome = self.report.grown, self.report.chosen, self.report.outcome
        self._ranking = RankingScratch.empty(self._rows.rows, vocabulary, 1, device)
        self.held = self._make_held() if drafter is not None and not drafting and each == 1 else None
        self._text = TextDraft.empty(sequences, MOST_TEXT_NODES, device) if drafting else None
        # The most rows that the path of a sequence can have.
        longest = min(max(drafter.proposals, MOST_TEXT_NODES) + 1, each) if drafter is not None else 1
        padded = bucket(longest, -(-LEAST_ROWS // sequences)) if self.held is None else 1
        self._context = ContextRows.empty(sequences, padded, device)
        self.draft: BlockDraft | None = None  # None if no drafter takes part in the step
        if drafter is not None and drafting:
            block = DeviceRows.empty("block", sequences, drafter.block_size, 1, device, pools.scratch_place)
            self.draft = BlockDraft(
                kernels, drafter, _over(state, block), each - 1, pools, self._settings, self._wishes
            )
        nothing = Candidates.empty(sequences, 1, CANDIDATES, device)
        self._candidates = self.draft.candidates if self.draft is not None else nothing
        self._branches = Branches.empty(*self._candidates.shape, self._head_scores is not None, device)
        self.taps: Tensor | None = None  # taps of the rows that were verified last
        self._source, self._destination = state.slots[:, :sequences]
        self._states = self._make_states()

    def _make_held(self) -> HeldTaps | None:
        assert self.drafter is not None
        turns, pools = min(MOST_HELD_TURNS, _MOST_HELD_ROWS // self.sequences), self._pools
        if turns <= 1:
            return None
        width = self.drafter.context.width
        return HeldTaps.empty(self.sequences, turns, width, pools.scratch_place, pools.device)

    def _make_states(self) -> DeviceStates | None:
        """Returns what recurrent layers need for the rows; None if the target has no such layers.

        A step of one row per sequence has no choice of rows, so it writes the state after that row at once. A step of
        several rows writes states only when the accepted path is known (`_keep_states`).
        """
        tensors = device_tensors(self._pools.states)
        if tensors is None:
            return None
        saves = self._destination if self.each == 1 else None
        return tensors.over(self._rows, self._source, self._pools.scratch_place, saves)

    @property
    def _head_scores(self) -> HeadScores | None:
        return self.draft.head_scores if self.draft is not None else None

    @property
    def phases(self) -> list[tuple[str, Callable[[], None]]]:
        """The launches of the step in order, each under the name that a profile gives it."""
        drafted = [("draft", self.draft.run)] if self.draft is not None else []
        if self.draft is not None and self._head_scores is not None:
            drafted.append(("heads", self.draft.ask_heads))
        write = self._write_context if self.held is None else self._hold_taps
        written = [("context write", write)] if self.drafter is not None else []
        return [*drafted, ("tree", self._grow), ("verify", self._verify), ("accept", self._accept), *written]

    def launch(self) -> None:
        """Launches all phases in order; a captured graph replays these launches."""
        for _, phase in self.phases:
            phase()

    def _grow(self) -> None:
        """Turns the chain or tree that each sequence wishes for into rows."""
        pools, wishes, text = self._pools, self._wishes, self._text
        if text is not None:
            self._kernels.match_text(pools.tokens, self._rows, wishes, pools.page_tokens, LONGEST_MATCH, text)
        self._kernels.grow(
            self._candidates.tokens,
            self._candidates.scores,
            wishes,
            self._head_scores,
            self._rows,
            pools.scratch_place,
            pools.page_tokens,
            self._grown,
            self._branches,
            text,
        )

    def _verify(self) -> None:
        """Runs the target over the rows and chooses its own token after each of them; the taps are kept."""
        tapped = self.drafter.taps if self.drafter is not None else ()
        hidden, self.taps = self._target.run(self._rows, self._pools, tapped, self._states)
        used = slice(0, self._rows.rows)
        self._kernels.choose(
            self._target.logits(hidden)[used],
            self._rows.positions[used],
            self._settings,
            self.each,
            self._chosen,
            self._ranking,
        )

    def _accept(self) -> None:
        """Accepts a path of each sequence: length and anchor advance, and kept keys and values are moved together."""
        pools = self._pools
        self._kernels.accept(
            self._chosen,
            self._rows,
            self._grown,
            self._wishes.anchors,
            self._outcome,
            self._context,
            pools.tokens,
            pools.scratch_place,
        )
        if self._text is not None:  # without drafts, the only kept row of a sequence is in its place already
            for keys, values in pools.groups:
                self._kernels.compact(keys, values, self._rows, self._outcome)
        if self._states is not None:
            self._keep_states(self._states)

    def _keep_states(self, states: DeviceStates) -> None:
        """Writes the state after each accepted path into the sequence's other slot.

        The slot that the step read keeps its state, so the host can still drop the step.
        """
        source, destination, taken = self._source, self._destination, self._outcome.taken
        if states.saves is None:
            replay = Replay(source, destination, self._outcome.path, taken, self.each)
            self._kernels.delta.commit(states, replay)
        self._kernels.delta.swap(source, destination, taken)

    def _write_context(self) -> None:
        """Writes draft context from the taps of the accepted paths."""
        pools, context = self._pools, self._context
        assert self.drafter is not None and self.taps is not None
        self.drafter.context.write(
            self.taps.index_select(0, context.gather),
            context.positions,
            context.places,
            pools.draft_keys,
            pools.draft_values,
        )

    def _hold_taps(self) -> None:
        """Stores the taps of the accepted rows beside those that earlier steps have left."""
        assert self.taps is not None
        self._kernels.hold(self.taps, self._context, self.held, self._pools.scratch_place)

    def write_held(self) -> None:
        """Writes draft context from the held taps; afterwards nothing is held."""
        pools, held = self._pools, self.held
        assert self.drafter is not None and held is not None
        self.drafter.context.write(held.taps, held.positions, held.places, pools.draft_keys, pools.draft_values)
        self.hold_nothing()

    @torch.inference_mode()
    def hold_nothing(self) -> None:
        """Drops the held taps: their places become the scratch place, which no sequence reads."""
        assert self.held is not None
        self.held.places.fill_(self._pools.scratch_place)


def _over(state: DecodeState, rows: DeviceRows) -> DeviceRows:
    """Returns the same rows over the lengths and pages of the state, which every commit on the device advances."""
    return replace(rows, base=state.length[: rows.sequences], pages=state.pages[: rows.sequences])
