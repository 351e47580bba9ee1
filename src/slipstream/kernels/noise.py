"""Sampling noise as a pure function of (seed, position, token): Philox4x32-10, then Gumbel.

Because nothing else enters, a seed gives one text however many tokens are drafted or batched at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Four words per counter of four words; words are int64 tensors holding unsigned 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _LOW) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = product1 & _LOW, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def gumbel_rows(seed: int, positions: range, vocab_size: int) -> Tensor:
    """Gumbel noise [positions, vocabulary] in fp32 for tokens sampled at these absolute positions."""
    blocks = -(-vocab_size // 4)
    token_block = torch.arange(blocks).repeat(len(positions))
    position = torch.arange(positions.start, positions.stop).repeat_interleave(blocks)
    zero = torch.zeros_like(token_block)
    words = philox((token_block, position & _LOW, position >> 32, zero), (seed & _LOW, seed >> 32))
    # the smallest uniform values make the largest noise, where log1p keeps them apart
    uniform = torch.stack(words, dim=-1).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_().view(len(positions), -1)[:, :vocab_size]
