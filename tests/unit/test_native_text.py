"""The compiled index of a text against the one in Python, on random texts, estimates and bounds."""

from __future__ import annotations

import random

import pytest

from slipstream.kernels.cpu.native_library import library
from slipstream.speculative.estimate import DraftOutcome, Estimate, Record
from slipstream.speculative.suffix_index import CompiledIndex, SuffixIndex, text_index
from slipstream.types import Source


@pytest.mark.skipif(library() is None, reason="no compiled kernels")
@pytest.mark.parametrize("seed", range(40))
def test_the_compiled_index_grows_what_the_one_in_python_grows(seed: int) -> None:
    """The same nodes in the same order, to the last bit, for any estimate and any bounds."""
    chance, estimate = random.Random(seed), Estimate(Record())
    for _ in range(chance.choice([0, 60])):
        seen = DraftOutcome(chance.random(), chance.randint(1, 8), chance.random() < 0.4, Source.TEXT)
        estimate.learn([seen])
    alphabet, size = chance.choice([1, 2, 3, 5, 20]), chance.choice([1, 30, 400])
    text = [chance.randrange(alphabet) for _ in range(size)]
    one, other = SuffixIndex(), text_index()
    assert isinstance(other, CompiledIndex)
    for index in (one, other):
        index.extend(text)
        index.truncate(max(1, size - 9))
        index.extend(text[-9:])
    assert other.occurrences() == one.occurrences()
    for floor, first in ((0.0, 0.0), (0.05, 0.0), (0.2, 0.4), (0.0, 1.01)):
        for known in (None, estimate):
            nodes, depth = chance.choice([1, 4, 15, 64]), chance.choice([1, 3, 15])
            assert other.grow(nodes, depth, known, floor, first) == one.grow(nodes, depth, known, floor, first)
