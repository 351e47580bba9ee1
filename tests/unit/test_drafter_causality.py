"""Which rows of a drafter's layers see which, as a GGUF file says it."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.kernels.rows import AttentionPattern
from slipstream.models.dflash_config import llama_cpp_keys, read_gguf
from tests.models.test_pair import GGUF

WINDOWS: dict[str, object] = {
    "dflash.attention.sliding_window": 20,
    "dflash.attention.sliding_window_pattern": [True, False],
}


def patterns(**changes: object) -> tuple[AttentionPattern, ...]:
    extra = {f"dflash.attention.{key}": value for key, value in changes.items()}
    return read_gguf(GGUF | WINDOWS | extra, "d.gguf").patterns


def test_a_layers_window_decides_where_the_file_says_nothing() -> None:
    assert patterns() == (AttentionPattern(20, True), AttentionPattern(0, False))


@pytest.mark.parametrize("causal", [True, False])
def test_what_the_file_says_holds_for_every_layer(causal: bool) -> None:
    assert patterns(causal=causal) == (AttentionPattern(20, causal), AttentionPattern(0, causal))
    full = read_gguf(GGUF | {"dflash.attention.causal": causal}, "d.gguf")
    assert full.patterns == (AttentionPattern(0, causal),) * 2


def test_another_writers_key_means_the_same() -> None:
    renamed = llama_cpp_keys({"dflash-draft.attention.causal": False}, "dflash-draft")
    assert renamed == {"dflash.attention.causal": False}


def test_a_flag_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dflash\.attention\.causal"):
        patterns(causal="yes")
