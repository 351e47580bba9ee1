"""Builds a drafter with the DFlash authors' package from a file's weights, to compare its logits or speed with ours.

The package is not a dependency; it is imported when a comparison asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.engine.block_scoring import OurBlocks
from slipstream.errors import ConfigError, SourceError
from slipstream.models.dflash_config import DFlashConfig
from slipstream.models.rope import RopeConfig
from slipstream.tools.model_file import ModelFile, open_model


class AuthorBlocks:
    """A drafter in the authors' package. It reads the taps, the embedding and the head that `OurBlocks` uses."""

    label = "dflash (authors)"

    def __init__(self, ours: OurBlocks, path: Path) -> None:
        self._ours = ours
        self.proposals = ours.proposals
        with open_model(path) as model:
            if not isinstance(model.config, DFlashConfig):
                raise ConfigError(f"{path.name} is not a drafter: {model.problem or model.kind}")
            if model.config.sample_from_anchor:
                raise ConfigError(
                    f"{path.name} also proposes a token in its anchor's slot, which the authors' package does not do",
                    "compare it with another file instead",
                )
            self._model = build_authors_drafter(model, model.config)
        # The package also lacks the confidence head. That head chooses no tokens, so only the Markov head is reported.
        self.left_out = "the Markov head" if ours.drafter.config.parts.markov_rank else ""

    def begin(self, ids: Sequence[int]) -> None:
        """Sets the text; `OurBlocks.begin` must have had the same text, because its taps are read."""
        self._ids = ids

    @torch.inference_mode()
    def block(self, position: int) -> tuple[Tensor, list[int]]:
        """The block after `position`, from the taps that `OurBlocks` has recorded; nothing is cached between blocks."""
        ours, model = self._ours, self._model
        size, config = ours.drafter.config.block_size, ours.drafter.config
        first = max(0, position - ours.window) if ours.window else 0
        ids = torch.tensor([self._ids[position], *[config.mask_token_id] * (size - 1)])
        scale = 1.0 if config.input_embedding_scale is None else config.input_embedding_scale
        hidden = model(
            target_hidden=ours.taps[None, first:position],
            noise_embedding=ours.embed(ids)[None] * scale,
            position_ids=torch.arange(first, position + size)[None],
        )[0, 1:]
        logits = model.compute_logits(hidden, ours.head)
        if not config.parts.selector_rank:
            return logits, [int(token) for token in logits.argmax(-1)]
        return logits, self._selected(hidden, logits, position)

    def _selected(self, hidden: Tensor, logits: Tensor, position: int) -> list[int]:
        """Runs the authors' selector slot by slot. As in `OurBlocks`, each slot gets the text's own token before it."""
        chosen = []
        for slot in range(len(logits)):
            before = self._ids[min(position + slot, len(self._ids) - 1)]
            path, _, _ = self._model.candidate_selector.select(
                hidden[None, slot : slot + 1], logits[None, slot : slot + 1], torch.tensor([before]), 0.0
            )
            chosen.append(int(path[0, 0]))
        return chosen


def build_authors_drafter(model: ModelFile, config: DFlashConfig) -> Any:
    """The authors' drafter with the file's weights, in fp32."""
    try:
        import dflash.model as authors
    except ImportError as error:
        raise SourceError(
            f"the authors' package cannot be imported: {error}",
            "install it with: pip install transformers && pip install --no-deps dflash",
        ) from None
    cls = authors.DFlash2DraftModel if config.parts.selector_rank else authors.DFlashDraftModel
    built = cls(_their_config(config)).eval()
    known = set(built.state_dict())
    state = {name: tensor.dense() for name, tensor in model.tensors.items() if name in known}
    lacking = sorted(known - set(state))
    if lacking:
        raise ConfigError(f"{model.label} lacks what the authors' drafter needs: {', '.join(lacking[:3])}")
    built.load_state_dict(state)
    return built


def _their_config(config: DFlashConfig) -> Any:
    from transformers import Qwen3Config

    if config.rope != RopeConfig(config.rope.theta, config.head_dim):
        raise ConfigError(f"{config.label} uses scaled rotary embeddings", "only plain ones can be compared")
    causal = {pattern.causal for pattern in config.patterns}
    # This is the package's own default: layers with a window are causal, and the others are not.
    as_typed = all(pattern.causal == bool(pattern.window) for pattern in config.patterns)
    windows = {pattern.window for pattern in config.patterns if pattern.window}
    if len(windows) > 1 or not (as_typed or len(causal) == 1):
        raise ConfigError(f"{config.label} mixes windows or causality", "the authors' package takes one for all layers")
    parts = config.parts
    settings: dict[str, Any] = {} if as_typed else {"is_causal": causal.pop()}
    if windows:
        kinds = ["sliding_attention" if pattern.window else "full_attention" for pattern in config.patterns]
        settings |= {"layer_types": kinds, "sliding_window": windows.pop(), "use_sliding_window": True}
    settings |= {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_eps,
        "attention_bias": config.attention_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers or max(config.target_layer_ids) + 4,
        "dflash_config": {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "output_multiplier": config.output_multiplier,
            "final_logit_softcapping": config.final_logit_softcapping,
            "conv_kernel_size": parts.conv_kernel_size,
            "conv_group_size": parts.conv_group_size,
            "selector_rank": parts.selector_rank,
            "selector_top_k": parts.selector_top_k,
        },
    }
    return Qwen3Config(**settings)
