"""The included drafters compared with each other and with the authors' package, on answers of the real target."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipstream.bench.workloads import read_prompts
from slipstream.cli import compare as cli_compare
from slipstream.config import EngineConfig
from slipstream.formats.sources import resolve
from slipstream.tools.authors_drafter import AuthorBlocks
from slipstream.tools.logits import compare_drafters, load_blocks, write_passages

pytestmark = pytest.mark.e2e

TOKENS = 32
PROMPTS = [turns[0] for turns in read_prompts("humaneval", 1)]


def test_the_shipped_drafter_is_the_authors_to_rounding() -> None:
    passages, _ = write_passages("smollm2", None, PROMPTS, EngineConfig(), TOKENS)
    path = resolve("smollm2-dflash").path
    (ours,) = load_blocks(resolve("smollm2").path, [("ours", path)], "fp32")
    found = compare_drafters(AuthorBlocks(ours, path), ours, passages, "fp32")
    assert found.rows >= 60
    assert found.max_difference < 2e-2 and found.mean_divergence < 1e-6 and found.agreement > 0.98
    one, two = found.taus
    assert one is not None and two is not None
    assert one == pytest.approx(two, rel=0.1) and one > 1.5


def test_two_shipped_drafters_have_the_taus_the_engine_measures(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"logits": True, "prompts": "humaneval", "limit": 1, "max_tokens": TOKENS}
    cli_compare.command("smollm2-dflash", "smollm2-dspark", json_output=True, **options)
    (found,) = json.loads(capsys.readouterr().out)["logits"]
    assert found["answer_tokens"] <= TOKENS and 0.3 < found["top1_agreement"] < 1
    for side, draft in (("tau_first", "smollm2-dflash"), ("tau_second", "smollm2-dspark")):
        _, measured = write_passages("smollm2", draft, PROMPTS, EngineConfig(), TOKENS)
        assert found[side] == pytest.approx(measured)
