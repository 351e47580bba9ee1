"""Constraints of requests: llguidance tries each one before its request is accepted, and then computes its masks.

Clients write constraints, and llguidance recurses along their references without a limit of time or memory. It
therefore runs in two child processes: one tries new constraints, the other computes the masks of running requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

from slipstream.errors import RequestError
from slipstream.grammar.guide import Budget, Guide, Vocabulary
from slipstream.grammar.mask_lane import MASK_LIMITS, Lane, Matcher
from slipstream.grammar.notations import CALL_CLOSE, CALL_OPEN
from slipstream.isolation import MIB, Helper, Limits, OverrunError
from slipstream.types import Constraint, Thinking

MOST_SOURCE_BYTES = 512 * 1024  # the size of a schema of 300 definitions with 10 fields each
REMEMBERED = 4096  # constraints that passed their trial, kept as hashes; at this many all are forgotten
# 64 tools or 300 definitions compile in 0.3 s and 30 MiB. 80 MiB is 20 times the largest body that a server accepts by
# default; 17 MiB of it are the stack of the trial.
# A call waits 3 s at most, because a server prepares requests on few threads. After a trial the process rests as long
# as the trial took: a trial writes many megabytes and pushes the weights of a running model out of the processor's
# cache, so trials without a pause make running requests twice as slow.
_LIMITS = Limits(cpu_s=2, memory_bytes=80 * MIB, answer_bytes=MIB, wait_s=3.0, rest=1.0)
# These tags are written as text in a grammar, even if the tokenizer has them as special tokens.
_TAGS = frozenset({"<think>", "</think>", CALL_OPEN, CALL_CLOSE})
_TEXT = "/(?s:.*)/"
_GAP = r"/[ \n]{0,4}/"  # models write this between the end of their reasoning and the answer
_NAMES = {"json_schema": "schema", "lark": "grammar", "regex": "pattern"}  # the words of error messages


class Grammars:
    """The constraints of one tokenizer's requests; any thread may call it."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self.lane = Lane()
        self._accepted: set[tuple[str, bytes, Thinking | None]] = set()
        self.trial = Helper(
            "slipstream.grammar.helper_process:trial",
            _LIMITS,
            self._vocabulary_arguments,
            "process that tries constraints",
        )
        self._masks = Helper(
            "slipstream.grammar.helper_process:desk",
            MASK_LIMITS,
            partial(self._vocabulary_arguments, whole=True),
            "process that computes masks",
        )
        self._ended: list[int] = []  # numbers of ended requests, which the mask process may forget

    def close(self) -> None:
        """Ends both processes; the next call that needs one starts a new one."""
        self.trial.close()
        self._masks.close()

    def guide(self, constraint: Constraint | None, thinking: Thinking | None) -> Guide | None:
        """Returns what holds a new request to its constraint and its budget, or None if it has neither."""
        budget = None
        if thinking is not None and thinking.budget is not None:
            budget = Budget(thinking, self._vocabulary)
        if constraint is None:
            return None if budget is None else Guide(None, self.lane, budget, self._vocab_size)
        self.prepare(constraint, thinking)
        opening = constraint.kind, constraint.grammar, self._reasoning_grammar(thinking)
        matcher = Matcher(self._masks, opening, self._ended)
        return Guide(matcher, self.lane, budget, self._vocab_size)

    def prepare(self, constraint: Constraint, thinking: Thinking | None) -> None:
        """Raises `RequestError` if a constraint cannot be used."""
        source = constraint.grammar.encode("utf-8", "surrogatepass")
        # the budget of the reasoning does not change the grammar
        key = (constraint.kind, sha256(source).digest(), replace(thinking, budget=None) if thinking else None)
        if key in self._accepted:
            return
        name = _NAMES[constraint.kind]
        if len(source) > MOST_SOURCE_BYTES:
            raise RequestError(f"the {name} has {len(source)} bytes", f"at most {MOST_SOURCE_BYTES} are taken")
        try:
            self.trial(constraint.kind, constraint.grammar, self._reasoning_grammar(thinking))
        except OverrunError as error:
            raise RequestError(f"the {name} cannot be used: compiling it {error}", "make it simpler") from None
        except RequestError as error:
            hint = error.hint or "change it or leave it out"
            raise RequestError(f"the {name} cannot be used: {error.message}", hint) from None
        if len(self._accepted) >= REMEMBERED:
            self._accepted.clear()
        self._accepted.add(key)

    def _reasoning_grammar(self, thinking: Thinking | None) -> str | None:
        """Returns the grammar of the reasoning that precedes the answer, or None if there is no reasoning."""
        if thinking is None:
            return None
        opening = "thinking" if thinking.opened else f"({self._tag(thinking.start)} thinking)?"
        end = self._tag(thinking.end)
        reasoning = f"thinking: {_TEXT} {end}" if end.startswith("<") else f"thinking[suffix={end}]: {_TEXT}"
        return f"start: {opening} GAP @answer\n{reasoning}\nGAP: {_GAP}\n"

    def _tag(self, tag: str) -> str:
        ids = self._vocabulary.encode(tag, add_bos=False)
        special = len(ids) == 1 and self._vocabulary.is_special(ids[0]) and tag not in _TAGS
        return f"<[{ids[0]}]>" if special else json.dumps(tag)

    def _vocabulary_arguments(self, whole: bool = False) -> Sequence[Any]:
        """Describes the vocabulary for another process: bytes, special tokens, end tokens, BOS, and the tokenizer.

        The tokenizer is included only if `whole` is set.
        """
        indices, vocabulary = range(self._vocab_size), self._vocabulary
        tokens = [vocabulary.token_bytes(index) for index in indices]
        tags = {tag.encode() for tag in _TAGS}
        special = [index for index in indices if vocabulary.is_special(index) and tokens[index] not in tags]
        ends = sorted(index for index in vocabulary.eos_ids if index < self._vocab_size)
        if not ends:
            raise RequestError("the model has no token that ends a text", "a constraint needs one")
        backend = vocabulary.serialized() if whole else None
        return [token.decode("latin-1") for token in tokens], special, ends, vocabulary.bos_id, backend
