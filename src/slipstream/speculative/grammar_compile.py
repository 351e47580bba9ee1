"""Compiling constraints with llguidance, each once for one tokenizer.

The library recurses along a constraint's references and has no limit of time or memory, and clients write constraints.
So a child process compiles each first, on a small stack and within limits, and takes its first masks; only what ended
well there is compiled here, on a stack four times as large.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slipstream.errors import BusyError, RequestError
from slipstream.isolation import MIB, Helper, Limits, OverrunError
from slipstream.speculative.guide import Budget, Guide, Vocabulary, one_line
from slipstream.types import Constraint, Thinking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llguidance import LLMatcher, LLTokenizer

MOST_SOURCE_BYTES = 512 * 1024  # a schema of 300 definitions with 10 fields each
_STACK_BYTES = 64 * MIB  # four times the trial's; only what is used of it takes memory
_REMEMBERED_GRAMMARS = 64
_REMEMBERED_BYTES = 256 * MIB  # of what the remembered ones hold: a few bytes of source may hold 20 MiB
# 64 tools or 300 definitions compile in 0.3 s and 30 MiB. 80 MiB is 20 times the largest body a server takes by
# default; 17 MiB of it are the stacks of the trial.
_LIMITS = Limits(cpu_s=2, memory_bytes=80 * MIB, answer_bytes=MIB)
_WAIT_S = 3.0  # for other constraints to be compiled; a server prepares requests on few threads
_TAGS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})  # text, whatever a tokenizer calls them
_TEXT = "/(?s:.*)/"
_GAP = r"/[ \n]{0,4}/"  # what models write between the end of their reasoning and the answer


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: LLMatcher
    held_bytes: int


_Key = tuple[Constraint, Thinking | None]


class Grammars:
    """Compiles constraints for one tokenizer, each once; any thread may ask."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[_Key, _Compiled] = OrderedDict()
        # as long as a request holds its constraint, it is not compiled again on the thread that steps the engine
        self._wanted: WeakKeyDictionary[Constraint, dict[Thinking | None, _Compiled]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()
        source = _TokenSource(vocabulary, vocab_size)
        self._trial = Helper(
            "slipstream.speculative.grammar_trial:trial", _LIMITS, source.described, "process that tries constraints"
        )

    def close(self) -> None:
        """Ends the process that tries constraints; another one is started where it is needed again."""
        self._trial.close()

    def guide(self, constraint: Constraint | None, thinking: Thinking | None) -> Guide | None:
        """What holds a new request to its constraint and its budget; None if it has neither."""
        budget = None
        if thinking is not None and thinking.budget is not None:
            budget = Budget(thinking, self._vocabulary)
        matcher = self.prepare(constraint, thinking) if constraint is not None else None
        return Guide(matcher, budget, self._vocab_size) if matcher is not None or budget is not None else None

    def prepare(self, constraint: Constraint, thinking: Thinking | None) -> LLMatcher:
        """The compiled constraint, at its start; one that cannot be compiled is refused."""
        # how much may be thought is no matter of the grammar
        key = (constraint, replace(thinking, budget=None) if thinking is not None else None)
        found = self._found(key)
        if found is None:
            with self._turn():
                found = self._found(key) or self._compile(*key)
        self._remember(key, found)
        return found.matcher

    def _found(self, key: _Key) -> _Compiled | None:
        with self._lock:
            return self._ready.get(key) or self._wanted.get(key[0], {}).get(key[1])

    def _remember(self, key: _Key, found: _Compiled) -> None:
        constraint, thinking = key
        with self._lock:
            # of equal constraints the newest is asked for last
            self._wanted[constraint] = {**self._wanted.pop(constraint, {}), thinking: found}
            self._ready[key] = found
            self._ready.move_to_end(key)
            held_bytes = sum(entry.held_bytes for entry in self._ready.values())
            while len(self._ready) > _REMEMBERED_GRAMMARS or held_bytes > _REMEMBERED_BYTES:
                held_bytes -= self._ready.popitem(last=False)[1].held_bytes

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One constraint is compiled at a time: each may take a processor and the limit of memory."""
        if not self._compiling.acquire(timeout=_WAIT_S):
            raise BusyError("too many new constraints are being compiled")
        try:
            yield
        finally:
            self._compiling.release()

    def _compile(self, constraint: Constraint, thinking: Thinking | None) -> _Compiled:
        from slipstream.speculative.grammar_library import GrammarError, compiled, library_tokenizer, on_a_stack

        kind, source, name = constraint.kind, constraint.grammar, _NAMES[constraint.kind]
        size_bytes = len(source.encode("utf-8", "surrogatepass"))
        if size_bytes > MOST_SOURCE_BYTES:
            raise RequestError(f"the {name} has {size_bytes} bytes", f"at most {MOST_SOURCE_BYTES} are taken")
        before = self._behind(thinking) if thinking is not None else None
        try:
            held_bytes: int = self._trial(kind, source, before)
            if self._tokenizer is None:
                origin = _TokenSource(self._vocabulary, self._vocab_size)
                self._tokenizer = library_tokenizer(origin, origin.ends)
            matcher = on_a_stack(_STACK_BYTES, compiled, self._tokenizer, kind, source, before)
        except OverrunError as error:
            raise RequestError(f"the {name} cannot be used: compiling it {error}", "make it simpler") from None
        except (GrammarError, RequestError) as error:
            hint = getattr(error, "hint", "") or "change it or leave it out"
            raise RequestError(f"the {name} cannot be used: {one_line(_words(error))}", hint) from None
        return _Compiled(matcher, max(held_bytes, size_bytes))

    def _behind(self, thinking: Thinking) -> str:
        """The grammar of reasoning and what comes behind it, the answer."""
        opening = "thinking" if thinking.opened else f"({self._tag(thinking.start)} thinking)?"
        end = self._tag(thinking.end)
        reasoning = f"thinking: {_TEXT} {end}" if end.startswith("<") else f"thinking[suffix={end}]: {_TEXT}"
        return f"start: {opening} GAP @answer\n{reasoning}\nGAP: {_GAP}\n"

    def _tag(self, tag: str) -> str:
        ids = self._vocabulary.encode(tag, add_bos=False)
        special = len(ids) == 1 and self._vocabulary.is_special(ids[0]) and tag not in _TAGS
        return f"<[{ids[0]}]>" if special else json.dumps(tag)


_NAMES = {"json_schema": "schema", "lark": "grammar", "regex": "pattern"}


def _words(error: Exception) -> str:
    return error.message if isinstance(error, RequestError) else str(error)


class _TokenSource:
    """A tokenizer as llguidance asks for it: every token's bytes, and how a text is cut by rights."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self.bos_token_id = vocabulary.bos_id

    @property
    def ends(self) -> list[int]:
        found = sorted(index for index in self._vocabulary.eos_ids if index < self._vocab_size)
        if not found:
            raise RequestError("the model has no token that ends a text", "a constraint needs one")
        return found

    @property
    def eos_token_id(self) -> int:
        return self.ends[0]

    @property
    def tokens(self) -> list[bytes]:
        return [self._vocabulary.token_bytes(index) for index in range(self._vocab_size)]

    @property
    def special_token_ids(self) -> list[int]:
        tags = {tag.encode() for tag in _TAGS}
        return [
            index for index in range(self._vocab_size)
            if self._vocabulary.is_special(index) and self._vocabulary.token_bytes(index) not in tags
        ]

    def described(self) -> Sequence[Any]:
        """The same for another process, which cannot ask back how a text is cut."""
        tokens = [token.decode("latin-1") for token in self.tokens]
        return tokens, self.special_token_ids, self.ends, self.bos_token_id

    def __call__(self, text: str) -> list[int]:
        wanted = text.encode()
        # some tokenizers put a space before a text; behind a control character it is not the text's first any more
        for lead in ("", "\x02"):
            ids = self._vocabulary.encode(lead + text, add_bos=False, parse_special=False)
            while ids and len(b"".join(map(self._vocabulary.token_bytes, ids))) > len(wanted):
                ids = ids[1:]
            if b"".join(map(self._vocabulary.token_bytes, ids)) == wanted:
                return ids
        return []
