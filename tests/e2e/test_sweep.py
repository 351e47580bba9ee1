"""The real pair in other weight types and with adapters, compared by the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.formats.sources import resolve
from tests.adapters import write_random_adapter

pytestmark = pytest.mark.e2e


def test_a_coarse_drafter_drafts_otherwise_and_changes_no_text(as_json: Any, tmp_path: Path) -> None:
    found = as_json(
        "bench",
        "--sweep",
        "draft=as-is,q4_0",
        "--prompts",
        "gsm8k",
        "--limit",
        "5",
        "--max-tokens",
        "24",
        "--modes",
        "chain",
        "--out",
        str(tmp_path / "out"),
    )
    original, coarse = found["columns"]
    assert coarse["about"]["draft"]["how"] == "requantised"
    assert coarse["sets"]["gsm8k"]["tau"] != original["sets"]["gsm8k"]["tau"] > 2
    for column in found["columns"]:
        assert column["sets"]["gsm8k"]["same_texts"] == {"same": 5, "of": 5}
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000


def test_a_spoiling_adapter_really_costs_tau(as_json: Any, tmp_path: Path) -> None:
    adapter = write_random_adapter(tmp_path / "noise", resolve("smollm2-dspark").path, ("fc",), size=1.0)
    found = as_json(
        "bench",
        "--draft-lora",
        str(adapter),
        "--prompts",
        "gsm8k",
        "--limit",
        "5",
        "--max-tokens",
        "24",
        "--modes",
        "chain",
        "--out",
        str(tmp_path / "out"),
    )
    assert [column["name"] for column in found["columns"]] == ["base", "noise"]
    against = found["columns"][1]["sets"]["gsm8k"]["tau_against"]
    assert against["verdict"] == "real" and against["ratio"] < 0.9
    assert all(column["sets"]["gsm8k"]["same_texts"] == {"same": 5, "of": 5} for column in found["columns"])
