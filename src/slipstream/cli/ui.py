"""Everything that is drawn on a terminal: streamed and tinted text, footers, tables and progress bars.

Results go to stdout and everything else to stderr; progress bars are drawn only if stderr is a terminal.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from slipstream.stats import PolicyStats, RequestStats
from slipstream.types import Progress as LoadProgress
from slipstream.types import TokenOut

Span = tuple[str, Literal["accepted", "rejected", "bonus", "note"]]  # a piece of a drawn step, and its role
DRAFTED_STYLE = "cyan"
_SPAN_STYLES = {"accepted": "bold cyan", "rejected": "dim", "bonus": "bold", "note": ""}
_LEVELS = "▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉"
_FACT_WIDTH = 100  # characters of a value; longer ones, such as a tokenizer's lists, would fill the screen
_BAR_CHARACTERS = 40  # Width of the longest bar; names and remarks beside wider bars would not fit into 80 columns.


class Ui:
    """The two output streams of one command; with `json_output` only `print_json` may write to stdout."""

    def __init__(self, json_output: bool = False) -> None:
        self.json_output = json_output
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False, soft_wrap=True)

    def print_json(self, value: Mapping[str, object]) -> None:
        # The output is ASCII, so that it survives any locale of the terminal or pipe.
        print(json.dumps(value), flush=True)

    def write(self, text: str, style: str | None = None) -> None:
        """Writes a piece of text without a line end, markup or wrapping."""
        if self.json_output:
            return
        self.out.out(text, style=style, end="", highlight=False)
        self.out.file.flush()

    def line(self, text: str = "") -> None:
        """Prints one line of a result on stdout."""
        self.out.print(escape(text))

    def lines(self, texts: Iterable[str]) -> None:
        """Prints each text that is not empty on a line of its own."""
        for text in filter(None, texts):
            self.line(text)

    def note(self, text: str) -> None:
        """Prints a remark on stderr."""
        self.err.print(escape(text), style="dim")

    def warn(self, text: str) -> None:
        self.err.print(escape(text), style="yellow")

    def draw(self, spans: Sequence[Span]) -> None:
        """Prints one line of a drawing on stderr."""
        self.err.print(Text.assemble(*[(text, _SPAN_STYLES[role]) for text, role in spans]))

    def table(
        self, title: str, heads: Sequence[str], rows: Iterable[Sequence[str | Text]], numbers: bool = True
    ) -> None:
        """Prints a table whose first column names the row; `numbers` aligns the other columns to the right."""
        table = Table()
        for index, head in enumerate(heads):
            table.add_column(escape(head), justify="right" if index and numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*[escape(cell) if isinstance(cell, str) else cell for cell in row])
        self._print_table(title, table)

    def facts(self, title: str, rows: Mapping[str, object]) -> None:
        """Prints keys and values; long values are cut."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan")
        table.add_column(overflow="fold")
        for key, value in rows.items():
            text = str(value).replace("\n", "\\n")
            table.add_row(escape(key), escape(text if len(text) <= _FACT_WIDTH else f"{text[: _FACT_WIDTH - 1]}…"))
        self._print_table(title, table)

    def _print_table(self, title: str, table: Table) -> None:
        # The title is printed apart, because a rich table breaks its own title at the width of the table.
        self.out.print(escape(title), style="bold")
        self.out.print(table, soft_wrap=False)

    @contextmanager
    def loading(self) -> Iterator[LoadProgress | None]:
        """Yields a callback (label, done, total) that draws one bar per label; None if stderr is no terminal."""
        if not self.err.is_terminal:
            yield None
            return
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        tasks: dict[str, TaskID] = {}
        with Progress(*columns, console=self.err, transient=True) as progress:

            def report(label: str, done: int, total: int) -> None:
                if label not in tasks:
                    tasks[label] = progress.add_task(escape(label), total=total or None)
                progress.update(tasks[label], completed=done, total=total or None)

            yield report

    @contextmanager
    def counting(self, label: str, total: int) -> Iterator[Callable[[], None]]:
        """Draws a bar over `total` pieces of work; each call of the yielded function advances it by one."""
        with self.loading() as report:
            counted = itertools.count()

            def advance() -> None:
                if report is not None:
                    report(label, next(counted), total)

            advance()
            yield advance


def footer(stats: RequestStats, plain_speed: float = 0.0) -> str:
    """One line about one answer; `plain_speed` is plain decoding's tokens per second on this machine, 0 if unknown."""
    parts = [f"{stats.completion_tokens} tokens", f"{stats.tokens_per_second:.1f} tok/s"]
    if stats.drafted:
        parts += [f"tau {stats.tau:.2f}", f"{stats.accept_rate:.0%} of drafts accepted"]
        if plain_speed and stats.tokens_per_second:
            parts.append(f"{stats.tokens_per_second / plain_speed:.2f}x plain decoding")
    else:
        parts.append(f"first token after {stats.ttft_ms:.0f} ms")
    if stats.cached_tokens:
        parts.append(f"{stats.cached_tokens} prompt tokens from the cache")
    return " · ".join(parts)


def policy_line(policy: PolicyStats) -> str:
    """How often each kind of step was chosen, the most frequent kind first."""
    steps = sum(policy.choices.values())
    ordered = sorted(policy.choices.items(), key=lambda item: -item[1])
    parts = [f"{choice} in {count}" for choice, count in ordered]
    return f"{', '.join(parts)} of {steps} steps" if parts else "no steps"


def bar_chart(rows: Sequence[tuple[str, float, str]]) -> list[str]:
    """One horizontal bar per (name, value, remark); the largest value fills the width."""
    names = max((len(name) for name, _, _ in rows), default=0)
    longest = max([1e-9, *[value for _, value, _ in rows]])
    lines = []
    for name, value, remark in rows:
        eighths = round(8 * _BAR_CHARACTERS * value / longest)
        bar = "█" * (eighths // 8) + _PARTS[eighths % 8].strip()
        lines.append(f"{name:<{names}} {bar:<{_BAR_CHARACTERS}} {remark}")
    return lines


def bars(shares: Sequence[float]) -> str:
    """Draws each share between 0 and 1 as one character."""
    return "".join(_LEVELS[min(len(_LEVELS) - 1, max(0, round(share * (len(_LEVELS) - 1))))] for share in shares)


def size(count: float) -> str:
    """A number of bytes in a readable unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


class DraftTint:
    """Splits the engine's text into spans that were drafted and spans that were not, so that they can be coloured.

    The engine's text decides what is shown, because the engine holds back half characters and possible stop strings.
    The texts of the tokens only tell how many characters each token added.
    """

    def __init__(self) -> None:
        self._origins: deque[bool] = deque()
        self._last = False

    def spans(self, tokens: Sequence[TokenOut], texts: Sequence[str], text: str) -> Iterator[tuple[str, bool]]:
        for token, own in zip(tokens, texts, strict=True):
            self._origins.extend([token.drafted] * len(own))
        for drafted, characters in itertools.groupby(text, lambda _: self._next_origin()):
            yield "".join(characters), drafted

    def _next_origin(self) -> bool:
        """Whether the next character was drafted; characters beyond the tokens' own are like the last one."""
        if self._origins:
            self._last = self._origins.popleft()
        return self._last
