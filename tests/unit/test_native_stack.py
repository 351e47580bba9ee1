"""A whole stack in one native call: a row's bits do not depend on other rows, the threads or the instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cpu import native_library
from slipstream.kernels.cpu.linear import NativeMatrix
from slipstream.kernels.cpu.native_library import Library
from slipstream.kernels.rows import AttentionPattern, RowBatch, make_group
from slipstream.models.cpu.native_pass import NativeStack
from slipstream.models.layers import Attention, Layer, LayerShape, Mlp, Sublayer
from slipstream.models.rope import RopeConfig
from tests.native import FLOATS, every_library, libraries, reference_product, stored

HEADS, KV_HEADS, DIM, INNER, VOCAB, PAGE, PAGES, LAYERS = 3, 1, 32, 160, 50, 16, 5, 2
ROWS, CONTEXT = 37, 5
CAUSAL = AttentionPattern()
Result = tuple[Tensor, Tensor | None, Tensor | None]  # hidden rows, taps, logits


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    yield
    native_library.set_threads(0)  # follows torch again


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Small:
    """Two layers with biases, with multiples of sixteen and odd numbers of outputs, and with their own pools."""

    def __init__(self, library: Library, kind: str, hidden: int) -> None:
        def linear(*outputs: int, inputs: int = hidden) -> NativeMatrix:
            return NativeMatrix(library, [stored(kind, count, inputs, seed=count) for count in outputs])

        wide, narrow, rope = HEADS * DIM, KV_HEADS * DIM, RopeConfig(1e4, DIM)
        norm = randn(hidden, seed=1) * 0.1 + 0.3
        attention = Attention(
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            rope=rope,
            pattern=CAUSAL,
            pool=0,
            scale=DIM**-0.5,
            qkv=linear(wide, narrow, narrow),
            qkv_bias=randn(wide + 2 * narrow, seed=2),
            output=linear(hidden, inputs=wide),
            output_bias=randn(hidden, seed=3),
            q_norm=None,
            k_norm=None,
        )
        layer = Layer(
            [Sublayer(attention, norm), Sublayer(Mlp(linear(INNER, INNER), linear(hidden, inputs=INNER)), norm)]
        )
        shape = LayerShape(
            hidden_size=hidden,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            intermediate_size=INNER,
            vocab_size=VOCAB,
            rms_eps=1e-5,
            rope=rope,
        )
        self.stack = NativeStack(library, shape, [layer] * LAYERS, norm)
        self.hidden, self.norm, self.head = hidden, norm, linear(VOCAB)
        self.head_weight = stored(kind, VOCAB, hidden, seed=VOCAB).dense()
        self.pools = [randn(PAGES, KV_HEADS, PAGE, DIM, seed=9) for _ in range(2 * LAYERS)]
        self._kv = list(zip(self.pools[::2], self.pools[1::2], strict=True))
        angles = torch.rand(PAGES * PAGE, DIM, generator=torch.Generator().manual_seed(7))
        self._rotary = angles.cos(), angles.sin()

    def run(self, first: int, count: int) -> Result:
        """Rows `first` to first + count of one sequence, after CONTEXT positions that the pools hold."""
        span = range(CONTEXT + first, CONTEXT + first + count)
        group = make_group(0, span, range(PAGES), PAGE, CAUSAL)
        places = [divmod(position, PAGE) for position in span]
        batch = RowBatch(
            [0] * count,
            span,
            [page for page, _ in places],
            [offset for _, offset in places],
            span.stop,
            {CAUSAL: [group]},
        )
        x = randn(ROWS, self.hidden, seed=4)[first : first + count].clone()
        return self.stack.run(x, batch, self._kv, self._rotary, self.head, range(count), (-1, 0))


def everything(result: Result) -> Tensor:
    return torch.cat([part for part in result if part is not None], dim=1)


@every_library()
@pytest.mark.parametrize(("kind", "hidden"), [("Q4_1", 96), ("Q8_0", 64), ("F16", 40)])
def test_rows_together_are_rows_one_after_the_other(library: Library, kind: str, hidden: int) -> None:
    native_library.set_threads(1)
    alone = Small(library, kind, hidden)
    expected = torch.cat([everything(alone.run(row, 1)) for row in range(ROWS)])
    assert expected.isfinite().all()
    for threads, sizes in [(1, (37,)), (2, (1, 2, 3, 6, 16, 9)), (2, (37,)), (3, (5, 16, 16)), (8, (4, 33))]:
        native_library.set_threads(threads)
        together, first, parts = Small(library, kind, hidden), 0, []
        for size in sizes:
            parts.append(everything(together.run(first, size)))
            first += size
        assert torch.equal(torch.cat(parts), expected), (threads, sizes)
        assert all(map(torch.equal, together.pools, alone.pools)), "what the cache holds"


@pytest.mark.skipif(len(libraries()) < 2, reason="no AVX-512")
def test_instruction_sets_agree_on_a_stack() -> None:
    native_library.set_threads(2)
    seen = [everything(Small(library, "Q4_1", 96).run(0, ROWS)) for library in libraries()]
    assert torch.equal(*seen)


@every_library()
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_logits_are_the_head_times_the_normed_rows(library: Library, kind: str) -> None:
    native_library.set_threads(2)
    small = Small(library, kind, 64)
    hidden, _, logits = small.run(0, 20)
    expected = reference_product(hidden, small.head_weight, float_rows=kind in FLOATS)
    assert logits is not None and torch.allclose(logits, expected, atol=1e-4)
    scales = hidden / small.norm
    assert torch.allclose(scales.square().mean(dim=1), torch.ones(20), atol=1e-3)
