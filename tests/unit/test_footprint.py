"""What a pair is expected to take, against what it takes."""

# mypy: disable-error-code="attr-defined, unused-ignore"

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.config import PAGE_TOKENS, EngineConfig
from slipstream.engine.memory_estimate import Footprint, footprint
from slipstream.errors import ConfigError, SourceError
from tests.tiny import tiny_llm

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("draft", [True, False])
def test_the_pool_is_known_to_the_byte(folder: Path, draft: bool) -> None:
    llm = tiny_llm(folder, draft=draft)
    needs = footprint(str(folder / "target"), str(folder / "draft") if draft else "none", llm.config)
    pools = llm.engine.executor.memory
    tensors = [tensor for layer in pools.target for tensor in layer] + [pools.draft_keys, pools.draft_values]
    held = sum(tensor.numel() * torch.float32.itemsize for tensor in tensors)
    assert needs.cache_tokens * needs.token_bytes == held
    assert needs.max_context == llm.max_context
    assert len(needs.files) == 1 + draft and all(path.exists() for path in needs.files)


def test_weights_count_as_they_will_lie_in_memory(folder: Path) -> None:
    target = folder / "target"
    size = (target / "model.safetensors").stat().st_size
    sizes = {
        name: footprint(str(target), "none", EngineConfig(weight_format=name)).weight_bytes
        for name in ("fp32", "bf16", "int8", "native")
    }
    assert size * 0.9 < sizes["fp32"] <= size  # the file is fp32, and has a header
    assert sizes["bf16"] * 2 == sizes["fp32"] and sizes["int8"] < sizes["bf16"]
    assert sizes["native"] == sizes["fp32"]


def test_a_budget_leaves_a_context_where_it_can() -> None:
    needs = Footprint((), weight_bytes=1000, token_bytes=10, max_context=4096, cache_tokens=16384)
    assert needs.within(1 << 20).cache_tokens == 16384  # already within a quarter of it
    assert needs.within(100_000).cache_tokens == 4096  # a quarter would be less than one context
    assert needs.within(300_000).cache_tokens == 7488  # a quarter, in whole pages
    small = needs.within(20_000)
    assert small.cache_tokens == 1856 and small.total <= 20_000  # not even one context fits beside the weights
    assert needs.within(500).cache_tokens == PAGE_TOKENS and needs.within(500).total > 500


def test_what_cannot_be_loaded_is_refused_like_by_the_engine(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no file"):
        footprint(str(tmp_path / "no.gguf"), "none", EngineConfig())
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes((folder / "target" / "model.safetensors").read_bytes())
    (other / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ConfigError, match="'mamba' is not a supported target"):
        footprint(str(other), "none", EngineConfig())
