"""Drawings of steps: what is accepted and what is not, folding, escaping, and the commands that show them."""

from __future__ import annotations

import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.draft_drawing import MAX_LINES, Line, draw_step, visible
from slipstream.cli.ui import Span, Ui, policy_line
from slipstream.stats import Decision, PolicyStats
from slipstream.types import Proposal, StepRecord, Verdict
from tests.fakes import FakeLLM

CHAIN = Decision("chain:4", "it pays", 2.5, 12.0)


def step(tokens: str, parents: list[int], path: list[int], bonus: str = "!", decision: Decision = CHAIN) -> StepRecord:
    committed = [*[ord(tokens[row]) for row in path[1:]], *map(ord, bonus)]
    proposal = Proposal(tuple(map(ord, tokens)), tuple(parents))
    return StepRecord(7, proposal, Verdict(tuple(path), tuple(committed)), decision, 1.0, 2.0)


def text(line: Line) -> str:
    return "".join(part for part, _ in line)


def role_of(line: Line, role: str) -> str:
    return "".join(part for part, its in line if its == role)


def test_a_chain_shows_the_kept_part_and_the_rest() -> None:
    head, path, rest = draw_step(3, step("abcd", [-1, 0, 1, 2], [0, 1]), chr)
    assert text(head) == "step 3 · chain:4 · 1 of 3 accepted · 3.0 ms · expected 2.5 tokens in 12.0 ms · it pays"
    assert text(path) == "✓ a│b ⇒ !"
    assert (role_of(path, "accepted"), role_of(path, "bonus")) == ("✓ │b", " ⇒ !")
    assert rest == [("✗    └c│d", "rejected")]


def test_branches_hang_under_the_token_they_follow() -> None:
    #      a ── b ── d ── e      accepted: a b d; rejected: e, c (beside b) with f after it, g beside d, h beside f
    tree = step("abcdefgh", [-1, 0, 0, 1, 3, 2, 1, 2], [0, 1, 3])
    lines = [text(line) for line in draw_step(1, tree, chr)]
    assert lines[1:] == ["✓ a│b│d ⇒ !", "✗  └c│f", "✗      └e", "✗    └g", "✗    └h"]


def test_a_plain_step_and_a_step_that_failed() -> None:
    head, path = draw_step(1, step("a", [-1], [0], decision=Decision()), chr)
    assert text(head) == "step 1 · plain · nothing drafted · 3.0 ms"
    assert text(path) == "  a ⇒ !"
    good = step("ab", [-1, 0], [0], bonus="")
    failed = StepRecord(7, good.proposal, Verdict((0,), (), failed=True), CHAIN, 1.0, 2.0)
    assert "not finite" in text(draw_step(1, failed, chr)[0]) and "⇒" not in text(draw_step(1, failed, chr)[1])


def test_wide_trees_are_folded_and_count_what_they_hide() -> None:
    branches = [-1, *[0] * 26]
    lines = draw_step(1, step("r" + "abcdefghijklmnopqrstuvwxyz", branches, [0, 1]), chr)
    assert len(lines) == MAX_LINES
    assert text(lines[-1]) == "  … 20 more"
    fits = draw_step(1, step("rabcdefg", [-1, *[0] * 7], [0, 1]), chr)
    assert len(fits) == MAX_LINES and "more" not in text(fits[-1])


@pytest.mark.parametrize("seed", range(20))
def test_every_drafted_token_is_drawn_once_or_counted(seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.randrange(2, 120)
    parents = [-1, *[draw.randrange(max(0, row - 9), row) for row in range(1, rows)]]
    tokens = "".join(chr(0x4E00 + row) for row in range(rows))  # two columns each
    path = [0]
    while children := [row for row, parent in enumerate(parents) if parent == path[-1]]:
        path.append(draw.choice(children))
    path = path[: draw.randrange(1, len(path) + 1)]
    lines = [text(line) for line in draw_step(1, step(tokens, parents, path), chr, width=10_000)]
    assert len(lines) <= MAX_LINES
    folded = int(lines.pop().split()[1]) if "more" in lines[-1] else 0
    drawn = [letter for line in lines[1:] for letter in line if letter in tokens]
    assert len(drawn) == len(set(drawn)) == rows - folded
    accepted = [letter for letter in lines[1] if letter in tokens]
    assert accepted == [tokens[row] for row in path]


def test_lines_stay_within_the_width() -> None:
    long_chain = step("".join(chr(65 + row) for row in range(26)), list(range(-1, 25)), [0])
    rejected = text(draw_step(1, long_chain, chr, width=20)[2])
    assert rejected.endswith("…") and len(rejected) <= 20
    deep = step("".join(chr(65 + row) for row in range(26)), list(range(-1, 25)), list(range(24)))
    assert text(draw_step(1, deep, chr, width=20)[2]) == "✗        …└Y│Z"


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("\n", "\\n"),
        ("\t", "\\t"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\u202e", "\\u202e"),
        (" é", " é"),
        ("  ", "␣␣"),
        ("[bold]", "[bold]"),
    ],
)
def test_what_would_move_the_cursor_is_escaped(token: str, shown: str) -> None:
    assert visible(token) == shown


def test_without_colour_the_marks_remain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    spans: list[Span] = [("✓ ", "accepted"), ("[red]x", "accepted"), (" ⇒ y", "bonus")]
    Ui().draw(spans)
    assert capsys.readouterr().err == "✓ [red]x ⇒ y\n"


def test_the_styles_tell_kept_from_rejected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    Ui().draw([("kept", "accepted"), ("not", "rejected")])
    shown = capsys.readouterr().err
    assert "\x1b[1;36mkept" in shown and "\x1b[2mnot" in shown


def test_the_policy_line_counts_choices() -> None:
    assert policy_line(PolicyStats({"plain": 2, "chain:8": 5})) == "chain:8 in 5, plain in 2 of 7 steps"


def test_generate_draws_on_stderr_and_leaves_the_text_alone(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("generate", "--prompt", "a\nb", "--mode", "tree:32", "--show-drafts")
    assert done.out == "You said a\nb, the 1th message.\n"
    lines = done.err.splitlines()
    assert lines[0].startswith("step 1 · tree:32 · 3 of 16 accepted")
    assert lines[1] == "✓ Y│o│u│␣ ⇒ s"
    assert sum(line.startswith("step 8 · ") for line in lines) == 1
    assert any("│\\n" in line or "⇒ \\n" in line for line in lines)
    assert "policy: tree:32 in 8 of 8 steps" in done.err and "tok/s" in lines[-1]
    assert "step 1" not in cli("generate", "--prompt", "a").err


def test_json_lists_the_steps_when_asked(cli: Any, fake_engine: type[FakeLLM]) -> None:
    result = json.loads(cli("generate", "--prompt", "x", "--show-drafts", "--json").out)
    assert len(result["steps"]) == result["stats"]["steps"]
    first = result["steps"][0]
    assert first["policy"]["choice"] == "chain:16" and first["verdict"]["accepted"] == 3
    assert [token for one in result["steps"] for token in one["verdict"]["tokens"]] == result["token_ids"][1:]
    answers = [json.loads(line) for line in cli("chat", "--show-drafts", "--json", stdin="a\nb\n").out.splitlines()]
    assert all(len(answer["steps"]) == answer["stats"]["steps"] for answer in answers)
    assert "✓ Y│o│u" in cli("chat", "--show-drafts", stdin="a\n").err


def test_the_trace_has_a_line_per_step(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text("old\n")
    done = cli("generate", "--prompt", "x", "--trace", str(file), "--json")
    result = json.loads(done.out)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, result["stats"]["steps"] + 1))
    assert {(line["request"], line["mode"]) for line in lines} == {("fake-1", "auto")}
    assert "".join(line["text"] for line in lines) == result["text"][1:]
    assert {"position", "proposal", "verdict", "policy", "times_ms"} <= set(lines[0])
    for options, mode in (
        (["--gate", "ema"], "chain"),
        (["--gate", "auto"], "auto"),
        (["--draft", "none"], "plain"),
        (["--plain"], "plain"),
    ):
        cli("generate", "--prompt", "x", "--trace", str(file), *options)
        assert json.loads(file.read_text().splitlines()[0])["mode"] == mode
    cli("chat", "--trace", str(file), stdin="a\n/mode chain:8\nb\n")
    seen = {(line["request"], line["mode"]) for line in map(json.loads, file.read_text().splitlines())}
    assert {mode for _, mode in seen} == {"auto", "chain:8"} and len(seen) == 2


def test_the_trace_is_on_disk_while_the_answer_is_being_written(
    cli: Any, fake_engine: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, whole, on_disk = tmp_path / "steps.jsonl", FakeLLM.stream, []

    def watched(self: FakeLLM, *arguments: Any, **settings: Any) -> Any:
        for event in whole(self, *arguments, **settings):
            on_disk.append(len(file.read_text().splitlines()))
            yield event

    monkeypatch.setattr(FakeLLM, "stream", watched)
    cli("generate", "--prompt", "x", "--trace", str(file))
    assert on_disk == [0, *range(len(on_disk) - 1)]


def test_a_full_disk_is_one_sentence(cli: Any, fake_engine: type[FakeLLM], tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        done = cli("generate", "--prompt", "x", "--trace", str(tmp_path / "steps.jsonl"), "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"slipstream: cannot write the trace {tmp_path / 'steps.jsonl'}: File too large\n"
    assert fake_engine.made[0].closed
