"""Draws what each decoding step drafted and what was kept of it, as a small block of lines.

The accepted path comes first, marked ✓. Branches that the target did not take hang under the token they follow, marked
✗.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len

from slipstream.cli.ui import Span, Ui, policy_line
from slipstream.stats import RequestStats
from slipstream.types import StepRecord

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

TextOf = Callable[[int], str]
Line = list[Span]

MAX_LINES = 8  # lines of one step at most; wider trees end with a count, so that an answer stays readable
_MARK_WIDTH = 2  # columns of the mark at the start of a line
_BETWEEN, _BRANCH, _BONUS = "│", "└", " ⇒ "


def visible(text: str) -> str:
    """A token's text, with every character escaped that would move the cursor or be invisible."""
    shown = text if text.strip(" ") else "␣" * len(text)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in shown
    )


def show_steps(ui: Ui, llm: LLM, steps: Sequence[StepRecord], stats: RequestStats | None) -> None:
    """Draws the steps of a complete answer, because drawing during it would count as decoding time."""
    for number, step in enumerate(steps, 1):
        for line in draw_step(number, step, llm.tokenizer.token_text, ui.err.width):
            ui.draw(line)
    if stats:
        ui.note(f"policy: {policy_line(stats.policy)}")


def draw_step(number: int, step: StepRecord, text_of: TextOf, width: int = 100) -> list[Line]:
    """Draws one step in at most MAX_LINES lines."""
    drawing = _Drawing(step, text_of, width)
    head: Line = [(_headline(number, step), "note")]
    path = drawing.accepted_path()
    branches = _branches(step)
    room = MAX_LINES - 2
    shown = branches if len(branches) <= room else branches[: room - 1]
    lines = [head, path, *[drawing.branch(rows) for rows in shown]]
    if shown != branches:
        hidden = sum(len(rows) for rows in branches[len(shown) :])
        lines.append([(f"{' ' * _MARK_WIDTH}… {hidden} more", "rejected")])
    return lines


def _headline(number: int, step: StepRecord) -> str:
    decision, drafted = step.decision, step.proposal.nodes
    took = f"{step.draft_ms + step.verify_ms:.1f} ms"
    outcome = f"{step.verdict.accepted} of {drafted} accepted" if drafted else "nothing drafted"
    parts = [f"step {number}", decision.choice, outcome, took]
    if decision.expected_tokens is not None and decision.expected_ms is not None:
        parts.append(f"expected {decision.expected_tokens:.1f} tokens in {decision.expected_ms:.1f} ms")
    if step.verdict.failed:
        parts.append("the target's logits were not finite")
    if decision.reason:
        parts.append(visible(decision.reason))
    return " · ".join(parts)


def _branches(step: StepRecord) -> list[list[int]]:
    """The rejected rows as lists, each from a branching point to a leaf, likeliest first.

    Rows have the order in which they were proposed, parents first, so a list comes after the list that it branches
    from.
    """
    kept = set(step.verdict.path)
    runs: list[list[int]] = []
    run_ending_at: dict[int, list[int]] = {}
    for row, parent in enumerate(step.proposal.parents):
        if row in kept:
            continue
        run = run_ending_at.pop(parent, None)
        if run is None:
            run = []
            runs.append(run)
        run.append(row)
        run_ending_at[row] = run
    return runs


class _Drawing:
    """Remembers the columns at which the tokens of one step end, so that a branch is drawn under its parent's end."""

    def __init__(self, step: StepRecord, text_of: TextOf, width: int) -> None:
        self._step, self._text_of, self._width = step, text_of, width
        self._ends: dict[int, int] = {}

    def accepted_path(self) -> Line:
        verdict = self._step.verdict
        line: Line = [("✓ " if verdict.accepted else "  ", "accepted")]
        column = _MARK_WIDTH
        for place, row in enumerate(verdict.path):
            text = (_BETWEEN if place else "") + self._text(row)
            line.append((text, "accepted" if place else "note"))
            column += cell_len(text)
            self._ends[row] = column
        for token in verdict.tokens[verdict.accepted :]:
            line.append((_BONUS + visible(self._text_of(token)), "bonus"))
        return line

    def branch(self, rows: Sequence[int]) -> Line:
        """One rejected run, cut at the width; a branching point that is too far right is moved left and marked …."""
        furthest = self._width // 2
        after = self._ends.get(self._step.proposal.parents[rows[0]], furthest + 1)
        start = min(after, furthest)
        text = "✗ " + " " * (start - _MARK_WIDTH - (after > furthest)) + "…" * (after > furthest) + _BRANCH
        column = start + 1
        for place, row in enumerate(rows):
            token = (_BETWEEN if place else "") + self._text(row)
            last = place == len(rows) - 1
            if column + cell_len(token) + (not last) > self._width and place:
                return [(f"{text}…", "rejected")]
            text += token
            column += cell_len(token)
            self._ends[row] = column
        return [(text, "rejected")]

    def _text(self, row: int) -> str:
        return visible(self._text_of(self._step.proposal.tokens[row]))
