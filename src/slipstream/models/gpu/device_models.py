"""Runs targets and drafters on a GPU: embedding, stack and head. Rows do not leave the device in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.gpu.delta_net_launch import DeviceStates
from slipstream.kernels.gpu.device_rows import DeviceRows
from slipstream.kernels.gpu.head_tables import CorrectionGate, HeadWeights, Trust
from slipstream.kernels.gpu.kernel_set import GpuKernels
from slipstream.kernels.gpu.paged_attention import DEEPEST_ROW
from slipstream.models.decoder import Decoder, DecoderConfig
from slipstream.models.dflash import DFlashDrafter
from slipstream.models.gpu.device_parts import DevicePools, DeviceSetting, RotaryPair
from slipstream.models.gpu.device_stack import GpuContext, GpuStack
from slipstream.models.gpu.device_weights import GpuEmbedding
from slipstream.models.heads import CandidateSelector, ConfidenceHead, DraftHeads
from slipstream.models.layers import SideEmbeddings
from slipstream.models.rope import RotaryTable

# The logit of tokens that a drafter's own head does not know. It is far below any real logit, and it is finite because
# with -inf a softmax over such tokens alone would become NaN.
_NEVER_DRAFTED = -1e30


class GpuTarget:
    """A target whose weights are on a device."""

    def __init__(self, kernels: GpuKernels, decoder: Decoder, positions: int, device: torch.device) -> None:
        self.decoder = decoder
        self.vocab_size = decoder.config.vocab_size
        self.kernels = kernels
        rotaries = {rope: rotary_pair(table, positions, device) for rope, table in decoder.rotaries.items()}
        setting = DeviceSetting(kernels, rotaries, decoder.config.rms_eps, device)
        self._stack = GpuStack(setting, decoder.layers, decoder.norm)
        self._sides = _DeviceSides(kernels, decoder.sides, decoder.config) if decoder.sides is not None else None

    def run(
        self, rows: DeviceRows, pools: DevicePools, tap_layers: Sequence[int], states: DeviceStates | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns hidden rows after the final norm, and the taps."""
        embed = device_embedding(self.decoder.embed)
        residual = embedded(self.kernels, embed, rows.tokens, embed.scale)
        sides = self._sides(residual, rows.tokens) if self._sides is not None else None
        return self._stack.run(residual, rows, pools, tap_layers, states, sides)

    def logits(self, hidden: Tensor) -> Tensor:
        found = logits(self.kernels, self.decoder.head, hidden)
        if self.decoder.config.softcap > 0:
            self.kernels.bend(found, 1.0, self.decoder.config.softcap)
        return found


class _DeviceSides:
    """An embedding of every row for every layer: the scaled sum of its token's and a projected one."""

    def __init__(self, kernels: GpuKernels, sides: SideEmbeddings, config: DecoderConfig) -> None:
        self._kernels = kernels
        self._sides = sides
        self._shape = sides.layers, sides.size
        self._norms = sides.norm.expand(sides.layers, -1).contiguous()
        # The model divides the projected rows by the square root of the width before it normalises them. A norm undoes
        # any such factor except in the epsilon, so the epsilon is multiplied by the width instead.
        self._eps = config.rms_eps * config.hidden_size

    def __call__(self, residual: Tensor, tokens: Tensor) -> Tensor:
        kernels, sides = self._kernels, self._sides
        projected = kernels.multiply(sides.projection, residual.to(torch.bfloat16)).view(-1, *self._shape)
        normed = torch.empty_like(projected)
        kernels.norm_parts(projected, self._norms, self._eps, normed)
        embed = device_embedding(sides.embed)
        own = embedded(kernels, embed, tokens, embed.scale).view(-1, *self._shape)
        return (own.add_(normed) * 2.0**-0.5).to(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class _DraftPools:
    """Gives a stack the draft context under the name by which it reads a target's keys and values."""

    target: Sequence[tuple[Tensor, Tensor]]
    scratch_place: int = 0  # only experts read it, and drafters have no experts


class GpuDrafter:
    """A drafter, or a variant of one, on the target's device."""

    def __init__(
        self,
        kernels: GpuKernels,
        drafter: DFlashDrafter,
        target: Decoder,
        window: int,
        positions: int,
        device: torch.device,
    ) -> None:
        config = drafter.config
        if config.proposals > DEEPEST_ROW:
            raise ConfigError(
                f"this drafter proposes {config.proposals} tokens at a time, and a GPU takes at most {DEEPEST_ROW}",
                "use --device cpu, or a drafter with smaller blocks",
            )
        self.drafter = drafter
        self.block_size = config.block_size
        self.first_slot = config.first_slot
        self.proposals = config.proposals
        self.width = config.hidden_size
        self.vocab_size = target.config.vocab_size
        self.taps = config.target_layer_ids
        self._kernels = kernels
        self._window = window
        # A head that depends on the whole path to a token runs on the host.
        self.heads = device_heads(drafter.heads, device) if drafter.heads is not None else None
        self.on_device = drafter.heads is None or self.heads is not None
        self.candidate_limit = drafter.heads.candidate_limit if drafter.heads is not None else 0
        drafter.borrow_softcap(target.config.softcap)
        self._embed = device_embedding(drafter.embed or target.embed)
        # A borrowed embedding keeps the target's scale, unless the drafter has a scale of its own for the raw rows.
        own = config.input_embedding_scale
        self._scale = own if own is not None else 1.0 if drafter.embed is not None else self._embed.scale
        self._head: Matrix = drafter.head or target.draft_head
        self._known = drafter.known_tokens.to(device) if drafter.known_tokens is not None else None
        rotary = rotary_pair(drafter.rotary, positions, device)
        setting = DeviceSetting(kernels, {config.rope: rotary}, config.rms_eps, device)
        self._stack = GpuStack(setting, drafter.layers, drafter.norm)
        self.context = GpuContext(kernels, drafter, rotary)

    def lay_out(self, rows: DeviceRows, anchors: Tensor, page_tokens: int) -> None:
        """Fills the rows with blocks: each has its anchor and then mask tokens."""
        self._kernels.block_rows(rows, anchors, self.drafter.config.mask_token_id, self._window, page_tokens)

    def run(self, rows: DeviceRows, keys: Tensor, values: Tensor) -> Tensor:
        """Returns hidden rows of the blocks after the final norm."""
        residual = embedded(self._kernels, self._embed, rows.tokens, self._scale)
        pools = _DraftPools(list(zip(keys, values, strict=True)))
        return self._stack.run(residual, rows, pools)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits over the target's vocabulary, with the drafter's multiplier and the softcap applied."""
        config, cap = self.drafter.config, self.drafter.softcap
        found = logits(self._kernels, self._head, hidden)
        if config.output_multiplier != 1.0 or cap > 0:
            self._kernels.bend(found, config.output_multiplier, cap)
        if self._known is None:
            return found
        return found.new_full((found.shape[0], config.vocab_size), _NEVER_DRAFTED).index_copy_(1, self._known, found)


def device_embedding(embed: object) -> GpuEmbedding:
    """Returns `embed`, which must be the embedding of a model whose weights are on a device."""
    assert isinstance(embed, GpuEmbedding), "the model's weights are not on a GPU"
    return embed


def embedded(kernels: GpuKernels, embed: GpuEmbedding, tokens: Tensor, scale: float) -> Tensor:
    """Returns the tokens' rows in fp32, times `scale`."""
    rows = kernels.embed(embed.table, tokens)
    return rows if scale == 1.0 else rows.mul_(scale)


def logits(kernels: GpuKernels, head: Matrix, hidden: Tensor) -> Tensor:
    """Computes logits in fp32, because bf16 is too coarse to rank a vocabulary by."""
    out = torch.empty(hidden.shape[0], head.out_features, dtype=torch.float32, device=hidden.device)
    return kernels.multiply(head, hidden, out)


def rotary_pair(table: RotaryTable, positions: int, device: torch.device) -> RotaryPair:
    cos, sin = table.tables(positions)
    return RotaryPair(cos[:positions].to(device), sin[:positions].to(device))


def device_heads(heads: DraftHeads, device: torch.device) -> HeadWeights | None:
    """Returns the heads as tables on a device; None if one of them depends on the whole path to a token."""
    corrector = heads.corrector
    trust = _trust(heads.trust, device) if heads.trust is not None else None
    if corrector is None:
        return HeadWeights(trust=trust)
    if isinstance(corrector, CandidateSelector):
        before, after = corrector.predecessors.table.to(device), corrector.successors.table.to(device)
        return HeadWeights(before, after, weigh=_floats(corrector.projection, device), trust=trust)
    if corrector.kind == "rnn":
        return None
    gate = None
    if corrector.kind == "gated":
        inner = torch.from_numpy(corrector.inner)
        gate = CorrectionGate(*(_floats(part, device) for part in (inner, corrector.of_hidden, corrector.bias)))
    before, after = corrector.embedding.table.to(device), corrector.output.table.to(device)
    return HeadWeights(before, after, gate=gate, trust=trust)


def _trust(head: ConfidenceHead, device: torch.device) -> Trust:
    of_hidden = _floats(head.of_hidden, device)
    if head.embedding is None or head.of_token is None:
        return Trust(of_hidden, head.bias)
    of_before = torch.from_numpy(head.of_token)
    return Trust(of_hidden, head.bias, head.embedding.table.to(device), _floats(of_before, device))


def _floats(values: Tensor, device: torch.device) -> Tensor:
    return values.to(device, torch.float32).contiguous()
