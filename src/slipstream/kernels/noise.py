"""Sampling noise as a pure function of (seed, position, token): Philox4x32-10, then Gumbel.

Because the noise depends on nothing else, a seed gives the same text however many tokens are drafted or batched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The constants of Philox4x32-10 as its authors published them; with others the noise differs from the compiled
# kernels'.
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF  # the lower 32 bits


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Returns four words for each counter of four words; a word is an int64 tensor of unsigned 32-bit values."""
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
    """Returns Gumbel noise [positions, vocabulary] in fp32 for tokens that are sampled at these absolute positions."""
    blocks = -(-vocab_size // 4)
    token_block = torch.arange(blocks).repeat(len(positions))
    position = torch.arange(positions.start, positions.stop).repeat_interleave(blocks)
    zero = torch.zeros_like(token_block)
    words = philox((token_block, position & _LOW, position >> 32, zero), (seed & _LOW, seed >> 32))
    # the smallest uniform values give the largest noise, and log1p keeps small values distinct
    uniform = torch.stack(words, dim=-1).to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_().view(len(positions), -1)[:, :vocab_size]
