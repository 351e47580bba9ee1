"""Checks, on the current machine, that the sums of a row do not depend on the rows beside it."""

from __future__ import annotations

import torch

from slipstream.config import PAGE_TOKENS
from slipstream.kernels.cpu.linear import Matrix
from slipstream.kernels.cpu.native_attention import attention
from slipstream.kernels.rows import AttentionPattern, make_group, make_tree_group

_ROWS = 16  # rows that are computed together and then one by one
_LENGTHS = (20, 150, 700)  # context lengths: within one page, over a few pages, over many
# int8 sums are integers, which are exact in any order, and int4 and native sums follow the order of the inputs. torch's
# dense GEMMs promise no order, so their formats are left out.
ROW_INVARIANT_FORMATS = ("native", "int4", "int8")


@torch.inference_mode()
def attention_is_exact(heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether a row's attention has the same bits alone, together with other rows, in a chain and in a tree."""
    source = torch.Generator().manual_seed(0)
    pages = -(-(max(_LENGTHS) + _ROWS) // PAGE_TOKENS)
    keys, values = (torch.randn(pages, kv_heads, PAGE_TOKENS, head_dim, generator=source) for _ in range(2))
    queries = torch.randn(_ROWS, heads, head_dim, generator=source)

    def attend(length: int, start: int, stop: int) -> torch.Tensor:
        span = range(length + start, length + stop)
        group = make_group(0, span, range(pages), PAGE_TOKENS, AttentionPattern())
        return attention(queries[start:stop], keys, values, [group], head_dim**-0.5)

    for length in _LENGTHS:
        together = attend(length, 0, _ROWS)
        tree = make_tree_group(0, length, range(-1, _ROWS - 1), range(pages), PAGE_TOKENS, AttentionPattern())
        if not torch.equal(attention(queries, keys, values, [tree], head_dim**-0.5), together):
            return False
        for start in range(0, _ROWS, 5):
            if not torch.equal(attend(length, start, start + 1)[0], together[start]):
                return False
    return True


@torch.inference_mode()
def matrix_is_exact(matrix: Matrix) -> bool:
    """Whether the product of one row with this matrix has the same bits alone and among other rows."""
    rows = torch.randn(_ROWS, matrix.in_features, generator=torch.Generator().manual_seed(0))
    together = matrix(rows)
    return all(torch.equal(matrix(rows[i : i + 1])[0], together[i]) for i in range(0, _ROWS, 5))
