"""Compiling constraints: what is refused before it is compiled, what is remembered, and what processes are left."""

# mypy: disable-error-code="index, unused-ignore"

from __future__ import annotations

import gc
import json
import random
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from slipstream.errors import BusyError, RequestError
from slipstream.grammar import helper_process as grammar_process
from slipstream.grammar import notations as grammars
from slipstream.grammar.constraints import Grammars
from slipstream.grammar.reference_bounds import MOST_REFERENCES, check_bounds
from slipstream.text.tokenizer import Tokenizer
from tests.hostile.chains import KINDS, chain
from tests.tiny import EOS, VOCAB, byte_tokenizer, tiny_llm
from tests.unit.test_isolation import gone


@pytest.fixture(scope="module")
def compiler() -> Grammars:
    return Grammars(Tokenizer(byte_tokenizer(), eos_ids=[EOS]), VOCAB)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "escaped"])
def test_chains_up_to_the_limit_are_taken_and_longer_ones_are_not(compiler: Grammars, kind: str) -> None:
    for length in (MOST_REFERENCES - 3, 4 * MOST_REFERENCES):
        constraint = chain(kind, length)
        if length < MOST_REFERENCES:
            check_bounds(constraint.kind, constraint.grammar)
        else:
            with pytest.raises(RequestError, match=f"more than {MOST_REFERENCES} of its"):
                check_bounds(constraint.kind, constraint.grammar)
    if kind != "one of":  # the library does not accept choices that overlap
        compiler.prepare(chain(kind, 200), None)


def test_circles_and_references_to_nowhere_have_no_length() -> None:
    names = [f"d{index}" for index in range(300)]
    chance = random.Random(0)
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{other}"} for other in chance.sample(names, 3)]} for name in names
    }
    items = [{"$ref": "#"}, {"$ref": "#/items/0/$ref/x"}, {"$ref": "#/items/77"}, {"$ref": 7}]
    check_bounds("json_schema", json.dumps({"$defs": definitions, "items": items}))
    check_bounds("lark", 'start: a | start\na: b a "c: d" /e: f/ // g: h\nb: a\n')


@pytest.mark.parametrize(
    "text", ['"\\' * 100_000, "/" * 100_001, "a" * 200_000, " " * 200_000, "a: " * 50_000, '%json {"a":' * 4_000]
)
def test_looking_at_a_grammar_takes_time_by_its_length(text: str) -> None:
    """A quadratic scan would take minutes, and the test's time limit would end it."""
    check_bounds("lark", text)


def test_a_constraint_has_a_size(compiler: Grammars) -> None:
    before = compiler.trial.pid
    with pytest.raises(RequestError, match=r"the pattern has 600000 bytes \(at most 524288 are taken\)"):
        compiler.prepare(grammars.regex("é" * 300_000), None)
    assert compiler.trial.pid == before


def test_what_no_text_fits_is_refused_at_once(compiler: Grammars) -> None:
    with pytest.raises(RequestError, match="no text fits it"):
        compiler.prepare(grammars.lark("start: T\nT: /a+/ & /b+/\n"), None)


def test_a_panic_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """Stands for the panic that pyo3 raises, which is not an Exception."""

    def panicking(*_: object, **__: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(grammar_process, "LLMatcher", panicking)
    attempt = grammar_process.trial(["a", "b"], [], [1], None, None)
    with pytest.raises(RequestError, match="index out of bounds"):
        attempt("lark", 'start: "panic"', None)


def test_waiting_for_other_constraints_has_an_end(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.prepare(grammars.regex("ready"), None)
    monkeypatch.setattr(compiler.trial, "limits", replace(compiler.trial.limits, wait_s=0.01))
    with compiler.trial.lock:
        compiler.prepare(grammars.regex("ready"), None)
        with pytest.raises(BusyError, match="tries constraints has been busy"):
            compiler.prepare(grammars.regex("new"), None)


def test_a_question_that_fails_does_not_move_a_request_on() -> None:
    """Tokens and a drafted path come in one question: the tokens may be taken in before the path fails."""
    work = grammar_process.Desk(grammar_process.tokenizer_of(["a", "b", "<end>"], [2], [2], None, None)).mask
    opening = ["regex", "a*b", None]
    expected = work(0, opening, [0], [], [])[:2]
    work(1, opening, [], [], [])
    with pytest.raises(RequestError):
        work(1, None, [0], [1, 1], [])
    assert work(1, None, [0], [], []) is None, "the request has to be opened again"
    assert work(1, opening, [0], [], [])[:2] == expected


def children() -> set[int]:
    """The processes that this one has started."""
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.usefixtures("threads")
def test_a_closed_model_leaves_no_process(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path, draft=False)
    before = children()
    llm.generate("x", constraint=grammars.regex("a+"), max_tokens=2)
    pids = children() - before
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids), pids
    assert all(psutil.Process(pid).nice() > psutil.Process().nice() for pid in pids), "the model's threads go first"
    llm.close()
    assert all(gone(pid, 5) for pid in pids), "closing is enough, whatever is still held"


def test_a_dropped_vocabulary_leaves_no_process() -> None:
    before = children()
    found = Grammars(Tokenizer(byte_tokenizer(), eos_ids=[EOS]), VOCAB)
    guide = found.guide(grammars.regex("a+"), None)
    assert guide is not None and guide.mask() is not None
    pids = children() - before
    del found, guide
    gc.collect()
    assert len(pids) == 2 and all(gone(pid, 5) for pid in pids)
