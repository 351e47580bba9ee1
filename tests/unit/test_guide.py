"""Guides, masks and budgets on vocabularies alone, without any model."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken

from slipstream.grammar import notations as grammars
from slipstream.grammar.constraints import Grammars
from slipstream.grammar.guide import Budget, Guide, GuideError, Mask
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import Thinking
from tests.tiny import EOS, VOCAB, byte_tokenizer
from tests.unit.test_tokenizer import sentencepiece


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """A vocabulary with one token per byte."""
    return Tokenizer(byte_tokenizer(), eos_ids=[EOS])


def test_a_budget_counts_only_what_is_inside(letters: Tokenizer) -> None:
    tokens = letters.encode("ab<think>cdef", add_bos=False)
    budget = Budget(Thinking(3, opened=False), letters)
    forced = [budget.forced(tokens[:count]) for count in range(len(tokens))]
    assert forced == [None] * 12 + letters.encode("<", add_bos=False)
    ended = Budget(Thinking(5), letters)
    for token in letters.encode("ab</think>", add_bos=False)[:5]:
        ended.observe(token)
    assert ended.forced(()) is not None, "the tag is not complete yet, and the budget is spent"
    early = Budget(Thinking(20), letters)
    for token in letters.encode("ab</think>" + "c" * 40, add_bos=False):
        assert early.forced(()) is None
        early.observe(token)


def test_a_budget_never_cuts_a_character(letters: Tokenizer) -> None:
    tokens = letters.encode("aé日🙂", add_bos=False)
    assert len(tokens) == 10
    budget = Budget(Thinking(0), letters)
    assert budget.forced(()) is not None
    forced = []
    for spent in range(1, 11):
        late = Budget(Thinking(spent), letters)
        for token in tokens[:spent]:
            late.observe(token)
        forced.append(late.forced(()) is not None)
    assert forced == [True, False, True, False, False, True, False, False, False, True]


def test_a_mask_reads_its_bits() -> None:
    rng = np.random.default_rng(0)
    flags = rng.random(77) < 0.3
    mask = Mask(np.packbits(flags, bitorder="little").tobytes(), 77)
    assert np.array_equal(mask.allowed, flags) and [token in mask for token in range(77)] == flags.tolist()
    assert Mask.single(76, 77).only == 76 and 76 in Mask.single(76, 77)
    with pytest.raises(GuideError):
        Mask(bytes(10), 77)


def complete(guide: Guide) -> bool:
    """Whether nothing but an end may follow, once the mask is there, which on a busy machine comes late."""
    guide.mask()
    assert guide.ready()
    return guide.complete


def test_a_sentencepiece_vocabulary_is_held_too() -> None:
    """A tokenizer that puts a space before every text; the space must not appear in the grammar's own tokens."""
    tokenizer = sentencepiece()
    guide = Grammars(tokenizer, tokenizer.vocab_size).guide(grammars.lark('start: "hello there"'), None)
    assert guide is not None
    written = b""
    while not complete(guide):
        mask = guide.mask()
        assert mask is not None
        token = int(np.flatnonzero(mask.allowed)[-1])
        written += tokenizer.token_bytes(token)
        guide.observe(token)
    assert written == b"hello there"


def test_tokenizers_differ_in_what_they_call_special() -> None:
    """A reasoning tag that is one special token of the vocabulary is found as such."""
    backend = byte_tokenizer()
    backend.add_special_tokens([AddedToken("<reason>", special=True), AddedToken("</reason>", special=True)])
    tokenizer = Tokenizer(backend, eos_ids=[EOS])
    end = tokenizer.encode("</reason>", add_bos=False)
    assert len(end) == 1
    thinking = Thinking(2, start="<reason>", end="</reason>")
    guide = Grammars(tokenizer, VOCAB).guide(grammars.regex("yes|no"), thinking)
    assert guide is not None
    for token in tokenizer.encode("ab", add_bos=False):
        mask = guide.mask()
        assert mask is not None and token in mask
        guide.observe(token)
    mask = guide.mask()
    assert mask is not None and mask.only == end[0]
    for token in (*end, *tokenizer.encode("no", add_bos=False)):
        mask = guide.mask()
        assert mask is not None and token in mask
        guide.observe(token)
    assert complete(guide)
