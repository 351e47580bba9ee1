"""`slipstream chat`: a conversation on the terminal; drafted tokens are tinted, and each answer shows its speed-up.

`slipstream chat --temperature 0.7`, or piped: `echo "Hello!" | slipstream chat --json`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.bench.measure import AnswerEvents
from slipstream.cli import options as o
from slipstream.cli.chat_session import COMMANDS, ChatSession, Message, QuitChat
from slipstream.cli.draft_drawing import show_steps
from slipstream.cli.trace import Trace
from slipstream.cli.ui import DRAFTED_STYLE, DraftTint, Ui, footer
from slipstream.errors import SlipstreamError
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

_PROMPT = "> "
# Plain decoding's speed is measured on this prompt with this many tokens. With fewer tokens the speed is noisy; with
# more, the user waits longer for the first question.
_PROBE_PROMPT = "Once upon a time"
_PROBE_TOKENS = 24


def command(
    target: o.Target = "smollm2",
    draft: o.Draft = "auto",
    draft_lora: o.DraftLora = None,
    system: Annotated[str, typer.Option(help="The system prompt.", show_default="the template's own")] = "",
    max_tokens: o.MaxTokens = 512,
    mode: o.ModeName = None,
    gate: o.GateName = None,
    confidence: o.Confidence = None,
    show_drafts: o.ShowDrafts = False,
    trace: o.TraceFile = None,
    temperature: o.Temperature = 0.0,
    seed: o.Seed = 0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    min_p: o.MinP = 0.0,
    repetition_penalty: o.RepetitionPenalty = 1.0,
    dtype: o.Dtype = "auto",
    device: o.DeviceName = "auto",
    kernels: o.KernelChoice = "triton",
    no_graphs: o.NoGraphs = False,
    exact: o.Exact = False,
    threads: o.Threads = 0,
    max_context: o.MaxContext = 0,
    draft_window: o.DraftWindow = None,
    no_text_drafts: o.NoTextDrafts = False,
    json_output: o.JsonOutput = False,
) -> None:
    """Talk to a model; /help lists the commands of the conversation."""
    ui = Ui(json_output)
    sampling = SamplingParams(
        temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    how = o.speculation(mode, gate, confidence)
    config = o.engine_config(
        dtype, threads, max_context, draft_window, device, kernels, no_graphs, exact, no_text_drafts
    )
    with Trace(trace) as steps_file, o.load(ui, target, draft, config, draft_lora or ()) as llm:
        session = ChatSession(
            draft_source=llm.draft_source,
            sampling=sampling,
            max_tokens=max_tokens,
            system=system,
            mode=how.resolved_mode(llm.speculates),
            gate=how.gate,
            min_confidence=how.min_confidence,
            variants=llm.draft_variants,
            draft_lora=o.chosen_variant(llm, draft_lora or ()),
        )
        chat = Chat(ui, llm, session, sys.stdin.isatty(), show_drafts, steps_file)
        if not chat.run():
            raise typer.Exit(2)


class Chat:
    """Reads lines, runs commands and shows answers until the input ends."""

    def __init__(
        self, ui: Ui, llm: LLM, session: ChatSession, interactive: bool, show_drafts: bool, trace: Trace
    ) -> None:
        self.ui, self.llm, self.session, self.interactive = ui, llm, session, interactive
        self.show_drafts, self.trace = show_drafts, trace
        self.plain_speed = self._measure_plain()

    def run(self) -> bool:
        """Returns False if the input is piped and a line of it failed, so that a script can notice it."""
        if self.interactive:
            self.ui.note(f"{self._greeting()} /help lists the commands, Ctrl-D leaves.")
        good = True
        try:
            for line in self._lines():
                good &= self._handle(line)
        except QuitChat:
            pass
        return good or self.interactive

    def _measure_plain(self) -> float:
        """Plain decoding's tokens per second now, with which every answer is compared; 0 if nothing drafts."""
        if not self.llm.speculates:
            return 0.0
        speed = 0.0
        for _ in range(2):  # the first run also pays for work that happens once, so the better one counts
            messages = [{"role": "user", "content": _PROBE_PROMPT}]
            done = self.llm.chat(messages, max_tokens=_PROBE_TOKENS, mode="plain", ignore_eos=True, cache_prompt=False)
            speed = max(speed, done.stats.tokens_per_second)
        return speed

    def _greeting(self) -> str:
        about = self.llm.describe()
        if not self.llm.speculates:
            return f"{about['target']} without a drafter."
        helper = about["draft"] if self.llm.has_draft else "drafts from the text itself"
        return f"{about['target']} with {helper}; plain decoding runs at {self.plain_speed:.1f} tok/s here."

    def _lines(self) -> Iterator[str]:
        if not self.interactive:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        import readline  # gives input() editing and history

        readline.set_completer_delims(" ")
        readline.set_completer(_complete)
        readline.parse_and_bind("tab: complete")
        while True:
            try:
                yield input(_PROMPT)
            except EOFError:
                self.ui.write("\n")
                return
            except KeyboardInterrupt:
                self.ui.note("\n/quit or Ctrl-D leaves.")

    def _handle(self, line: str) -> bool:
        try:
            if line.startswith("/"):
                self.ui.note(self.session.run(line))
            elif line.strip():
                self._turn(line)
        except SlipstreamError as error:
            self.ui.warn(str(error))
            return False
        return True

    def _turn(self, question: str) -> None:
        asked, answer = {"role": "user", "content": question}, AnswerEvents()
        self._stream([*self.session.messages(), asked], answer)
        stats = None if answer.finish_reason == "cancelled" else answer.stats
        self.session.answered(asked, answer.text, answer.stats)
        if self.ui.json_output:
            steps = {"steps": [step.to_json() for step in answer.steps]} if self.show_drafts else {}
            self.ui.print_json(answer.to_json() | steps)
            return
        self.ui.write("\n")
        if self.show_drafts:
            show_steps(self.ui, self.llm, answer.steps, stats)
        self.ui.note(footer(stats, self.plain_speed) if stats else "stopped")

    def _stream(self, messages: Sequence[Message], answer: AnswerEvents) -> None:
        """Shows the answer while it is written. Ctrl-C ends only the answer, which then keeps the text so far."""
        tint = DraftTint()
        events = self.llm.stream(messages, chat=True, **self.session.settings())
        try:
            for event in answer.follow(events):
                self.trace.record(str(self.session.mode), event, self.llm.tokenizer)
                for text, drafted in tint.spans(event.tokens, event.texts, event.text):
                    self.ui.write(text, DRAFTED_STYLE if drafted else None)
        except KeyboardInterrupt:
            events.close()


def _complete(text: str, state: int) -> str | None:
    matches = [f"/{name}" for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
    return matches[state] if state < len(matches) else None
