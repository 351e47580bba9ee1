"""Whether a pair fits is right to the byte, and so is what would fit instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.memory_estimate import footprint
from slipstream.errors import RequestError
from slipstream.formats.gguf import read_gguf
from slipstream.tools.fit import RUNTIME_BYTES, FitReport, fit, parse_size, quantised_bytes
from tests.helpers_models import smollm2_path

CONTEXT = 200  # 4 pages of 64


def needs(folder: Path, memory: int, draft: str | None = None, context: int = CONTEXT) -> FitReport:
    return fit(str(folder / "target"), draft or str(folder / "draft"), context=context, memory=memory)


def test_the_border_is_exact(folder: Path) -> None:
    known = footprint(str(folder / "target"), str(folder / "draft"), EngineConfig())
    least = known.weight_bytes + RUNTIME_BYTES + 4 * PAGE_TOKENS * known.token_bytes
    enough, short = needs(folder, least), needs(folder, least - 1)
    assert enough.total_bytes == least and enough.target_bytes + enough.draft_bytes == known.weight_bytes
    assert (enough.fits, enough.sequences, enough.largest_context) == (True, 1, 256)
    assert (short.fits, short.sequences, short.largest_context) == (False, 0, 192)
    assert enough.advice() == [f"It fits: one sequence of {CONTEXT} tokens at once."]
    assert "A context of 192 tokens fits." in short.advice()
    assert needs(folder, least + 4 * PAGE_TOKENS * known.token_bytes).sequences == 2


def test_a_drafter_costs_its_weights_and_its_context(folder: Path) -> None:
    pair, alone = needs(folder, 10**9), needs(folder, 10**9, "none")
    assert alone.draft_bytes == 0 and pair.draft_bytes > 0 and pair.target_bytes == alone.target_bytes
    assert pair.token_bytes > alone.token_bytes
    short = needs(folder, alone.total_bytes)
    assert not short.fits and short.without_draft and "Without the drafter it would fit." in short.advice()
    assert not needs(folder, alone.total_bytes - 1).without_draft


def test_nothing_fits_where_not_even_the_weights_do(folder: Path) -> None:
    none = needs(folder, 1000)
    assert (none.fits, none.sequences, none.largest_context, none.best_quant) == (False, 0, 0, None)
    assert none.advice()[1].startswith("It needs ")


def test_the_context_is_the_targets_own_unless_asked_for(folder: Path) -> None:
    assert needs(folder, 10**9, context=0).context == 1024
    assert needs(folder, 10**12).largest_context == 1024  # never more than the target was made for
    with pytest.raises(RequestError, match="-1 tokens"):
        needs(folder, 10**9, context=-1)


def test_a_smaller_quant_is_named_where_it_would_fit() -> None:
    whole = fit("smollm2", "auto", context=2048, memory=10**10)
    table = 49152 * 576 * 34 // 32  # embeddings are kept twice: as they are looked up, and as an output matrix
    assert whole.fits and 98362432 < whole.target_bytes < 98362432 + table and whole.token_bytes == 53760
    listed = {quant.type: quant for quant in whole.quants}
    assert "q8_0" not in listed and listed["q4_0"].weight_bytes < listed["q5_0"].weight_bytes < whole.target_bytes
    tight = fit("smollm2", "auto", context=2048, memory=listed["q5_0"].total_bytes)
    assert not tight.fits and tight.best_quant == "q5_0"
    assert "With the target quantised to q5_0 it would fit." in tight.advice()
    assert fit("smollm2", "auto", context=2048, memory=listed["q4_0"].total_bytes - 1).best_quant is None


def test_the_size_of_a_quant_is_that_of_its_blocks() -> None:
    path = smollm2_path()
    shapes = [entry.shape for entry in read_gguf(path).tensors]
    vectors = sum(4 * shape[0] for shape in shapes if len(shape) == 1)
    found = quantised_bytes(path, ["q8_0", "q4_k"])
    assert found["q8_0"] == vectors + sum(rows * wide // 32 * 34 for rows, wide in filter(is_matrix, shapes))
    # rows of 576 have no blocks of 256 and become Q5_0
    assert found["q4_k"] == vectors + sum(
        rows * (wide // 256 * 144 if wide % 256 == 0 else wide // 32 * 22) for rows, wide in filter(is_matrix, shapes)
    )


def is_matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4096", 4096),
        ("8G", 8 * 10**9),
        ("8GB", 8 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512 MiB", 2**29),
        ("2k", 2000),
        ("1TB", 10**12),
        ("1ti", 2**40),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "8X", "0", "0.1", "1e9", "8 G B", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="memory"):
        parse_size(text)


def test_the_command_tells_by_its_exit_code(cli: Any, folder: Path) -> None:
    pair = ["inspect", str(folder / "target"), "--fit", "--draft", str(folder / "draft"), "--context", str(CONTEXT)]
    done = cli(*pair, "--memory", "2GB", "--json")
    report = json.loads(done.out)
    assert (done.code, report["fit"]["fits"], report["fit"]["context"]) == (0, True, CONTEXT)
    done = cli(*pair, "--memory", "10MB")
    assert done.code == 1 and "It does not fit" in done.out and "largest context" in done.out
    done = cli("inspect", str(folder / "target"), "--memory", "2GB")
    assert done.code == 2 and "--fit" in done.err
    done = cli(*pair, "--memory", "lots")
    assert done.code == 2 and "not a size of memory" in done.err
