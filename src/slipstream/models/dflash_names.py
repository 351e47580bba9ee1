"""How drafter files spell their tensors: every tensor has one canonical name, and files may give it another.

The canonical names are those of Hugging Face without a prefix. Among the GGUF spellings of a tensor, llama.cpp's comes
first and lucebox's follow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from slipstream.formats.weight_files import WeightFile
from slipstream.models.llama import GGUF_LAYER

ShapeOf = Callable[[str], tuple[int, ...] | None]  # canonical name -> shape; None: the file has no such tensor

HEADS = ("markov_head.", "confidence_head.", "candidate_selector.")
_HF_OTHER = {
    "fc.weight": ("encoder.fc.weight",),
    "hidden_norm.weight": ("encoder.output_norm_enc.weight",),
    # The published checkpoints store both codebooks as bare parameters, without `.weight`.
    "candidate_selector.predecessor_codebook.weight": ("candidate_selector.predecessor_codebook",),
    "candidate_selector.successor_codebook.weight": ("candidate_selector.successor_codebook",),
}
GGUF_GLOBAL = {
    "fc.weight": ("fc.weight", "dflash.fc.weight", "dflash_fc.weight"),
    "hidden_norm.weight": ("enc.output_norm.weight", "dflash.hidden_norm.weight", "dflash_hidden_norm.weight"),
    "norm.weight": ("output_norm.weight",),
    "embed_tokens.weight": ("token_embd.weight", "embed_tokens.weight"),
    "lm_head.weight": ("output.weight", "lm_head.weight"),
    "markov_head.markov_w1.weight": ("markov_w1.weight", "dflash.dspark.markov.w1", "dflash.dspark.markov.w1.weight"),
    "markov_head.markov_w2.weight": ("markov_w2.weight", "dflash.dspark.markov.w2", "dflash.dspark.markov.w2.weight"),
    "markov_head.gate_proj.weight": ("markov_gate.weight",),
    "markov_head.gate_proj.bias": ("markov_gate.bias",),
    "markov_head.joint_proj.weight": ("markov_joint.weight",),
    "markov_head.joint_proj.bias": ("markov_joint.bias",),
    "confidence_head.proj.weight": ("conf_proj.weight", "dflash.dspark.confidence.weight"),
    "confidence_head.proj.bias": ("conf_proj.bias", "dflash.dspark.confidence.bias"),
    "candidate_selector.predecessor_codebook.weight": ("selector_predecessor.weight",),
    "candidate_selector.successor_codebook.weight": ("selector_successor.weight",),
    "candidate_selector.hidden_projection.weight": ("selector_hidden.weight",),
}
_GGUF_TAP_NORM = re.compile(r"^aux_hidden_norms\.(\d+)\.weight$")
_GGUF_LAYER_OTHER = {"post_attention_layernorm": ("post_attention_norm",)}
_GGUF_MODULES = GGUF_LAYER | {"self_attn.g_proj": "attn_gate"}
_GGUF_CONVOLUTION = {
    "attention_conv.base_kernel": "attn_conv_base",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_BUNDLE_PREFIX = re.compile(r"^mtp\.\d+\.")


class DrafterNames:
    """Finds the tensors of one file by their canonical names."""

    def __init__(self, names: Collection[str], gguf: bool) -> None:
        self._names = frozenset(names)
        self._gguf = gguf
        # In a DeepSeek bundle names begin with `mtp.` and the number of a stage, and the last stage has the heads. The
        # number does not matter, so this prefix is removed.
        self._bundled = {
            _BUNDLE_PREFIX.sub("", name, count=1): name for name in sorted(names) if _BUNDLE_PREFIX.match(name)
        }

    def __call__(self, name: str) -> str:
        """Returns the file's name for a tensor; if the file has no such tensor, the name it would most likely have."""
        spellings = gguf_spellings(name) if self._gguf else (name, *_HF_OTHER.get(name, ()))
        for spelling in spellings:
            if spelling in self._names:
                return spelling
            if f"model.{spelling}" in self._names and not self._gguf:
                return f"model.{spelling}"
            if name.startswith(HEADS) and spelling in self._bundled and not self._gguf:
                return self._bundled[spelling]
        return spellings[0]


def names_in(file: WeightFile) -> DrafterNames:
    return DrafterNames(file.names(), "general.architecture" in file.metadata)


def shapes_in(file: WeightFile) -> ShapeOf:
    names = names_in(file)

    def shape_of(name: str) -> tuple[int, ...] | None:
        return file.tensor(names(name)).shape if names(name) in file else None

    return shape_of


def canonical_name(name: str) -> str:
    """Returns the canonical name of a tensor of a Hugging Face checkpoint."""
    plain = _BUNDLE_PREFIX.sub("", name.removeprefix("model."), count=1)
    return next((canonical for canonical, others in _HF_OTHER.items() if plain in others), plain)


def gguf_spellings(name: str) -> tuple[str, ...]:
    """Returns all GGUF names of a tensor; the first one is the name to write."""
    if found := _GGUF_TAP_NORM.match(name):
        return (f"dflash.aux_hidden_norm.{found[1]}.weight", f"dflash.aux_hidden_norm.{found[1]}")
    if not name.startswith("layers."):
        return GGUF_GLOBAL.get(name, (name,))
    _, index, rest = name.split(".", 2)
    if rest in _GGUF_CONVOLUTION:
        return (f"blk.{index}.{_GGUF_CONVOLUTION[rest]}",)
    module, _, kind = rest.rpartition(".")
    if module not in _GGUF_MODULES:
        return (name,)
    spellings = (_GGUF_MODULES[module], *_GGUF_LAYER_OTHER.get(module, ()))
    return tuple(f"blk.{index}.{spelling}.{kind}" for spelling in spellings)
