"""The command line on the real pair: verbs run in this process, and one of each kind as a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e
SLIPSTREAM = str(Path(sys.executable).parent / "slipstream")
STATS = {
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "steps",
    "drafted",
    "accepted",
    "accepted_by_source",
    "tau",
    "tau_novel",
    "accept_rate",
    "accepted_per_position",
    "ttft_ms",
    "decode_ms",
    "tokens_per_second",
}


def slipstream(*arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([SLIPSTREAM, *arguments], input=stdin, capture_output=True, text=True, timeout=800)
    assert done.returncode == code, done.stderr
    return done


def test_generate_prints_one_object_and_the_same_text_with_and_without_drafts(as_json: Any) -> None:
    common = ("generate", "--target", "smollm2", "--prompt", "Count to ten.", "--chat", "--max-tokens", "32")
    fast, plain = json.loads(slipstream(*common, "--mode", "chain", "--json").stdout), as_json(*common, "--plain")
    assert set(fast) == {"text", "token_ids", "finish_reason", "draft", "stats"}
    assert set(fast["stats"]) >= STATS
    assert (fast["text"], fast["token_ids"]) == (plain["text"], plain["token_ids"])
    assert fast["stats"]["accepted"] > 0 == plain["stats"]["drafted"]
    assert fast["stats"]["steps"] < plain["stats"]["steps"] == plain["stats"]["completion_tokens"] - 1
    assert fast["stats"]["tau"] > 1 == plain["stats"]["tau"]


def test_generate_shows_and_traces_a_tree(cli: Any, as_json: Any, tmp_path: Path) -> None:
    trace = tmp_path / "steps.jsonl"
    common = ("generate", "--prompt", "Count to ten.", "--chat", "--max-tokens", "24", "--mode", "tree:24")
    done = as_json(*common, "--show-drafts", "--trace", str(trace))
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == len(done["steps"]) == done["stats"]["steps"]
    assert all({key: line[key] for key in step} == step for line, step in zip(lines, done["steps"], strict=True))
    kept = [token for step in done["steps"] for token in step["verdict"]["tokens"]]
    assert kept[: len(done["token_ids"]) - 1] == done["token_ids"][1:]
    widths = [len(step["proposal"]["tokens"]) for step in done["steps"]]
    assert max(widths) == 24 and any(
        parent != row - 1 for step in done["steps"] for row, parent in enumerate(step["proposal"]["parents"])
    )
    drawn = cli(*common, "--show-drafts")
    assert drawn.out == done["text"] + "\n"
    assert drawn.err.count("step ") >= len(lines) and "✓ " in drawn.err and "✗ " in drawn.err


def test_generate_reads_a_prompt_file_as_raw_text(as_json: Any, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("The capital of France is")
    done = as_json("generate", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "5", "--dtype", "int8")
    assert "Paris" in done["text"]
    assert done["stats"]["prompt_tokens"] == 5


def test_bench_compares_modes(as_json: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Add 17 and 25.", "Now double it."]}\n{"turns": ["Name three colours."]}\n')
    picture = tmp_path / "plot.svg"
    modes = as_json(
        "bench",
        "--prompts",
        str(prompts),
        "--max-tokens",
        "24",
        "--turns",
        "all",
        "--modes",
        "chain,tree:24,auto",
        "--plot",
        str(picture),
    )["modes"]
    assert list(modes) == ["plain", "chain", "tree:24", "auto"]
    for mode in modes.values():
        assert set(mode) >= STATS and mode["identical"] == {"same": 3, "of": 3, "near_ties": 0}
        low, high = mode["speedup_interval"]
        assert 0 < low <= high
    assert len({mode["text_hash"] for mode in modes.values()}) == 1
    assert modes["chain"]["accepted"] > 0 and modes["tree:24"]["accepted"] > 0 == modes["plain"]["drafted"]
    assert len(modes["chain"]["accepted_per_position"]) == 15, "the chain is not a full block"
    assert modes["auto"]["vs_best"]["mode"] in ("plain", "chain", "tree:24")
    assert picture.read_bytes().startswith(b"<?xml")


def test_chat_keeps_the_conversation() -> None:
    asked = "My name is Ada.\n/mode chain\nWhat is my name?\n"
    lines = slipstream("chat", "--max-tokens", "16", "--json", stdin=asked).stdout
    first, second = map(json.loads, lines.splitlines())
    assert second["stats"]["prompt_tokens"] > first["stats"]["prompt_tokens"] + 16
    assert second["stats"]["drafted"] > 0


def test_inspect_describes_target_and_drafter(as_json: Any) -> None:
    target = as_json("inspect", "smollm2")
    assert (target["architecture"], target["complete"], len(target["tensors"])) == ("llama", True, 272)
    drafter = as_json("inspect", "smollm2-dflash")
    assert drafter["architecture"] == "dflash"
    assert drafter["totals"]["Q8_0"]["count"] == 36


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", "--target", "no/such/folder/here", "--prompt", "x"), "no/such/folder/here"),
        (("generate", "--target", "smolm2", "--prompt", "x"), "did you mean smollm2"),
        (("generate", "--prompt", "x", "--draft", "smollm2"), "not a DFlash drafter"),
        (("generate", "--prompt", "x", "--draft", "none", "--mode", "chain"), "drafter"),
        (("generate", "--prompt", "x", "--mode", "chain:99"), "wider than"),
        (("generate", "--prompt", "x", "--mode", "tree:1"), "unknown mode"),
        (("generate", "--prompt", "x", "--trace", "no/such/folder/steps.jsonl"), "no/such/folder/steps.jsonl"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature"),
        (("generate", "--prompt", "x", "--max-tokens", "0"), "max_tokens"),
        (("bench", "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("generate", "--target", "smollm2-dflash", "--prompt", "x"), "not a supported target"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(cli: Any, arguments: tuple[str, ...], complaint: str) -> None:
    done = cli(*arguments)
    assert done.code == 2, done.err
    assert complaint in done.err
    assert len(done.err.strip().splitlines()) == 1 and "Traceback" not in done.err
    assert not done.out


def test_a_script_sees_the_same_sentence_and_code() -> None:
    done = slipstream("generate", "--target", "no/such/folder/here", "--prompt", "x", code=2)
    assert "no/such/folder/here" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not done.stdout
