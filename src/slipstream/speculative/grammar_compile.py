"""Compiling constraints with llguidance, each once for one tokenizer."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.errors import RequestError
from slipstream.speculative.constraint import Budget, Guide, Vocabulary, one_line
from slipstream.types import Constraint, Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_REMEMBERED_GRAMMARS = 64
_TAGS = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})  # text, whatever a tokenizer calls them
_TEXT = "/(?s:.*)/"
_GAP = r"/[ \n]{0,4}/"  # what models write between the end of their reasoning and the answer


class Grammars:
    """Compiles constraints for one tokenizer, each once; any thread may ask."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._ready: OrderedDict[tuple[Constraint, Thinking | None], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()

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
        with self._lock:
            found = self._ready.get(key)
        if found is None:
            found = self._compile(*key)  # outside the lock: others' constraints are ready and need not wait
        with self._lock:
            found = self._ready.setdefault(key, found)
            self._ready.move_to_end(key)
            if len(self._ready) > _REMEMBERED_GRAMMARS:
                self._ready.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint, thinking: Thinking | None) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with self._building:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._vocabulary, self._vocab_size)
        try:
            grammar = _grammar(constraint, self._behind(thinking) if thinking is not None else None)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
            error = matcher.get_error()
        except (ValueError, RecursionError) as failure:
            error = str(failure)
        if error:
            name = _NAMES[constraint.kind]
            raise RequestError(f"the {name} cannot be used: {one_line(error)}", "change it or leave it out")
        return matcher

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


def _grammar(constraint: Constraint, before: str | None) -> str:
    """The constraint as llguidance wants it, behind the grammar of what comes first."""
    from llguidance import LLMatcher

    if constraint.kind == "json_schema":
        answer = {"json_schema": json.loads(constraint.grammar)}
    elif constraint.kind == "regex":
        compiled = json.loads(LLMatcher.grammar_from_regex(constraint.grammar))
        answer = {"lark_grammar": compiled["grammars"][0]["lark_grammar"]}
    else:
        answer = {"lark_grammar": constraint.grammar}
    top = [] if before is None else [{"name": "top", "lark_grammar": before}]
    return json.dumps({"grammars": [*top, {"name": "answer", **answer}]})


def _tokenizer(vocabulary: Vocabulary, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    source = _TokenSource(vocabulary, vocab_size)
    ends = sorted(index for index in vocabulary.eos_ids if index < vocab_size)
    if not ends:
        raise RequestError("the model has no token that ends a text", "a constraint needs one")
    return LLTokenizer(TokenizerWrapper(source), n_vocab=vocab_size, eos_token=ends)


class _TokenSource:
    """A tokenizer as llguidance asks for it: every token's bytes, and how a text is cut by rights."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        ends = sorted(vocabulary.eos_ids)
        self._vocabulary = vocabulary
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = vocabulary.bos_id
        self.tokens = [vocabulary.token_bytes(index) for index in range(vocab_size)]
        tags = {tag.encode() for tag in _TAGS}
        self.special_token_ids = [
            index for index, content in enumerate(self.tokens) if vocabulary.is_special(index) and content not in tags
        ]

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
