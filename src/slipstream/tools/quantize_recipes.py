"""Chooses the type of each tensor of a model: plain types, two mixes, and a fallback if rows do not divide into blocks.

A plain type applies to every matrix. `q4_k_m` is llama.cpp's mix for dense models: Q4_K, but Q6_K for the output head
(or the token table if there is none) and for attn_v and ffn_down in the first and last eighth of the layers and in
every third layer between. `q4-mix` keeps the matrices around a drafter's layers (fc, heads, codebooks, token tables) in
Q8_0.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

RecipeName = Literal["f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k", "q4_k_m", "q4-mix"]
# For each recipe: the type of most matrices, and the number of `general.file_type` for such files.
RECIPES: dict[RecipeName, tuple[str, int]] = {
    "f16": ("F16", 1),
    "bf16": ("BF16", 32),
    "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2),
    "q4_1": ("Q4_1", 3),
    "q5_0": ("Q5_0", 8),
    "q5_1": ("Q5_1", 9),
    "q4_k": ("Q4_K", 14),
    "q5_k": ("Q5_K", 16),
    "q6_k": ("Q6_K", 18),
    "q4_k_m": ("Q4_K", 15),
    "q4-mix": ("Q4_0", 2),
}
EXACT = "F32"
SUPER_BLOCK, BLOCK = 256, 32  # values per block of the K types and of the others, as ggml defines them
# The types that llama.cpp uses for rows that do not divide into super-blocks: the next finer type with blocks of 32.
SMALLER_BLOCKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OUTPUTS = ("output.weight", "lm_head.weight")
_TOKEN_TABLES = ("token_embd.weight", "embed_tokens.weight")
_FINER_IN_SOME_LAYERS = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")
# These are small, and every step depends on them: norms, routers, convolution kernels, and the confidence head.
_SENSITIVE = re.compile(r"norm|ffn_gate_inp|conv1d|conv_base|conf_proj|confidence")


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """The type that a tensor gets; `wanted` differs from it if its rows do not divide, and `reason` then says so."""

    type_name: str
    wanted: str
    reason: str = ""


class Recipe:
    """One recipe for one model. It needs the names of all tensors, because some types depend on the layers' number."""

    def __init__(self, name: RecipeName, tensor_names: Collection[str]) -> None:
        self.name = name
        self.main, self.file_type = RECIPES[name]
        found = [_LAYER.match(tensor) for tensor in tensor_names]
        self._layers = 1 + max((int(match[1]) for match in found if match), default=-1)
        self._has_output = any(tensor in _OUTPUTS for tensor in tensor_names)

    def choose(self, tensor: str, shape: tuple[int, ...], stored: str) -> TypeChoice:
        """The type for a tensor that is stored as `stored`; `wanted` is empty for a tensor that stays exact."""
        experts = len(shape) == 3 and tensor.endswith("_exps.weight")
        if (len(shape) != 2 and not experts) or shape[-2] == 1 or _SENSITIVE.search(tensor):
            return TypeChoice(EXACT, "")
        return divided(self._wanted(tensor), shape[-1], stored)

    def _wanted(self, tensor: str) -> str:
        match = _LAYER.match(tensor)
        if self.name == "q4-mix":
            return "Q4_0" if match and "_conv_proj" not in tensor else "Q8_0"
        if self.name != "q4_k_m":
            return self.main
        if tensor in _OUTPUTS or (tensor in _TOKEN_TABLES and not self._has_output):
            return "Q6_K"
        if match and match[2] == "attn_qkv.weight":
            return "Q5_K"
        finer = match is not None and match[2] in _FINER_IN_SOME_LAYERS and self._gets_more_bits(int(match[1]))
        return "Q6_K" if finer else "Q4_K"

    def _gets_more_bits(self, layer: int) -> bool:
        eighth = self._layers // 8
        return layer < eighth or layer >= 7 * self._layers // 8 or (layer - eighth) % 3 == 2


def divided(wanted: str, width: int, stored: str) -> TypeChoice:
    """The wanted type, or its fallback if rows of `width` elements do not divide into its blocks."""
    chosen, reason = wanted, ""
    if wanted in SMALLER_BLOCKS and width % SUPER_BLOCK:
        chosen, reason = SMALLER_BLOCKS[wanted], f"rows of {width} do not divide by {SUPER_BLOCK}"
    if chosen.startswith("Q") and width % BLOCK:
        # A model in bfloat16 stays as it is; for any other, float16 has three bits more than bfloat16.
        chosen, reason = "BF16" if stored == "BF16" else "F16", f"rows of {width} do not divide by {BLOCK}"
    return TypeChoice(chosen, wanted, reason)
