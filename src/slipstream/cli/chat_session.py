"""A conversation, its settings, and the slash commands that change them; nothing here draws or generates."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from slipstream.errors import RequestError, SourceError
from slipstream.stats import RequestStats
from slipstream.types import BASE_VARIANT, Gate, Mode, SamplingParams

Message = dict[str, str]
N = TypeVar("N", int, float)


class QuitChat(Exception):
    """The user has asked to leave the chat."""


@dataclass(slots=True)
class ChatSession:
    """The messages so far, the settings of the next answer, and the summed statistics of all answers."""

    draft_source: Literal["drafter", "suffix"] | None  # what answers can speculate with, as LLM.draft_source says
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: Mode = field(default_factory=Mode)
    gate: Gate | None = None  # None leaves the choice to the mode
    min_confidence: float | None = None
    variants: Sequence[str] = (BASE_VARIANT,)  # the names of the drafter's variants
    draft_lora: str = BASE_VARIANT
    max_tokens: int = 512
    system: str = ""
    turns: list[Message] = field(default_factory=list)
    total: RequestStats = field(default_factory=RequestStats)

    def __post_init__(self) -> None:
        drafts = self.draft_source == "drafter" or self.draft_source == "suffix" and self.mode.reads_text
        if self.mode.kind != "plain" and not drafts:
            raise RequestError(f"mode {self.mode} needs a drafter", "start chat with --draft")
        if not _go_together(self.mode, self.gate):
            raise RequestError(f"gate {self.gate} does not go with mode {self.mode}", "choose another mode first")
        if self.max_tokens < 1:
            raise RequestError(f"max-tokens is {self.max_tokens}", "it must be 1 or more")

    def _set(self, **changes: Any) -> None:
        """Changes settings together; refuses those that a new session would refuse."""
        replace(self, **changes)
        for name, value in changes.items():
            setattr(self, name, value)

    def messages(self) -> list[Message]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def settings(self) -> dict[str, object]:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
        settings = {
            **{name: getattr(self.sampling, name) for name in names},
            "mode": str(self.mode),
            "gate": self.gate and str(self.gate),
            "min_confidence": self.min_confidence,
            "draft_lora": self.draft_lora,
            "max_tokens": self.max_tokens,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def answered(self, question: Message, text: str, stats: RequestStats) -> None:
        self.turns += [question, {"role": "assistant", "content": text}]
        self.total.add(stats)

    def run(self, line: str) -> str:
        """Runs a line that begins with a slash, and returns what to tell the user."""
        name, _, rest = line[1:].partition(" ")
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            raise RequestError(f"unknown command /{name}", f"did you mean /{near[0]}?" if near else "try /help")
        return COMMANDS[name].action(self, rest.strip())

    def _help(self, rest: str) -> str:
        width = max(len(command.usage) for command in COMMANDS.values())
        return "\n".join(f"{command.usage:<{width}}  {command.help}" for command in COMMANDS.values())

    def _reset(self, rest: str) -> str:
        self.turns.clear()
        return "A new conversation."

    def _mode(self, rest: str) -> str:
        if rest:
            mode = Mode.parse(rest)
            self._set(mode=mode, gate=self.gate if _go_together(mode, self.gate) else None)
        return f"mode {self.mode}, gate {self.gate or 'as the mode has it'}"

    def _gate(self, rest: str) -> str:
        if rest:
            self._set(gate=Gate.parse(rest))
        return self._mode("")

    def _lora(self, rest: str) -> str:
        if rest:
            if rest not in self.variants:
                known = f"known: {', '.join(self.variants)}" if self.variants else "start chat with --draft"
                raise RequestError(f"unknown draft variant '{rest}'", known)
            self.draft_lora = rest
        others = [name for name in self.variants if name != self.draft_lora]
        return f"drafting with {self.draft_lora}" + (f", there is also {', '.join(others)}" if others else "")

    def _temperature(self, rest: str) -> str:
        if rest:
            self.sampling = replace(self.sampling, temperature=_number(rest, float))
        return f"temperature {self.sampling.temperature:g}"

    def _seed(self, rest: str) -> str:
        if rest:
            self.sampling = replace(self.sampling, seed=_number(rest, int))
        return f"seed {self.sampling.seed}"

    def _max_tokens(self, rest: str) -> str:
        if rest:
            self._set(max_tokens=_number(rest, int))
        return f"max-tokens {self.max_tokens}"

    def _system(self, rest: str) -> str:
        self.system = rest
        return f"system prompt: {rest}" if rest else "The template's own system prompt."

    def _undo(self, rest: str) -> str:
        if not self.turns:
            raise RequestError("there is nothing to undo")
        del self.turns[-2:]
        return "The last question and its answer are forgotten."

    def _stats(self, rest: str) -> str:
        numbers = self.total.to_json()
        names = ("completion_tokens", "steps", "tau", "tau_novel", "accept_rate", "cached_tokens", "tokens_per_second")
        return "\n".join(f"{name:<18} {numbers[name]}" for name in names)

    def _save(self, rest: str) -> str:
        if not rest:
            raise RequestError("/save needs a file name")
        state = {"messages": self.messages(), "settings": self.settings(), "stats": self.total.to_json()}
        try:
            Path(rest).expanduser().write_text(json.dumps(state, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise SourceError(f"cannot write {rest}: {error.strerror}") from error
        return f"Saved to {rest}."

    def _quit(self, rest: str) -> str:
        raise QuitChat


@dataclass(frozen=True, slots=True)
class ChatCommand:
    usage: str
    help: str
    action: Callable[[ChatSession, str], str]


COMMANDS: dict[str, ChatCommand] = {
    "help": ChatCommand("/help", "list these commands", ChatSession._help),
    "reset": ChatCommand("/reset", "forget the conversation", ChatSession._reset),
    "undo": ChatCommand("/undo", "forget the last question and answer", ChatSession._undo),
    "mode": ChatCommand(
        "/mode [NAME]", "plain, chain, chain:ROWS, tree:ROWS, tree:ROWS:seed, tree:ROWS:text or auto", ChatSession._mode
    ),
    "gate": ChatCommand(
        "/gate [NAME]", "entropy, ema, auto or off; ema:margin=1.1 sets a threshold", ChatSession._gate
    ),
    "lora": ChatCommand("/lora [NAME]", "draft with this adapter; base is the drafter without one", ChatSession._lora),
    "temperature": ChatCommand("/temperature [X]", "0 always takes the likeliest token", ChatSession._temperature),
    "seed": ChatCommand("/seed [N]", "the same seed gives the same text", ChatSession._seed),
    "max-tokens": ChatCommand("/max-tokens [N]", "the most tokens of an answer", ChatSession._max_tokens),
    "system": ChatCommand(
        "/system [TEXT]", "set the system prompt; without TEXT, return to the template's", ChatSession._system
    ),
    "stats": ChatCommand("/stats", "show numbers over all answers so far", ChatSession._stats),
    "save": ChatCommand("/save FILE", "write the conversation as JSON", ChatSession._save),
    "quit": ChatCommand("/quit", "leave the chat", ChatSession._quit),
}


def _go_together(mode: Mode, gate: Gate | None) -> bool:
    """Whether a gate fits a mode: auto works only with its own gate, and plain decoding has nothing to gate."""
    return gate is None or gate.kind == {"auto": "auto", "plain": "off"}.get(mode.kind, gate.kind)


def _number(text: str, kind: Callable[[str], N]) -> N:
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"'{text}' is not a number") from None
