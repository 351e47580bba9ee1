"""Taps that wait while a sequence decodes plainly become the same draft context as taps written at once."""

# mypy: disable-error-code="attr-defined, unused-ignore"

from __future__ import annotations

import pytest
import torch

from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS
from slipstream.engine.executor import RowWork
from slipstream.engine.llm import LLM
from slipstream.errors import IntegrityError

pytestmark = pytest.mark.usefixtures("threads")
LENGTH = 66  # fewer rows wait than are written together


def decoded(llm: LLM, held: bool) -> torch.Tensor:
    """Returns the draft keys of a prompt that runs token by token, with its taps held back or written at once."""
    engine = llm.engine
    executor, contexts, pools = engine.executor, engine.contexts, engine.executor.memory
    state = SequenceState(engine.table, PAGE_TOKENS, pools, drafting=True)
    state.start([65 + i % 20 for i in range(LENGTH)], [])
    state.reserve(LENGTH)
    for position in range(LENGTH):
        with torch.inference_mode():
            result = executor.forward([RowWork(state, position, state.tokens[position : position + 1], 0)])
            if held and position >= 5:
                contexts.hold(result, 0, [0])
            else:
                contexts.write(result, [(0, [0])])
        state.commit([0], [], 1)
    if held:
        assert state.waiting_rows == LENGTH - 5
        twin = state.fork()
        assert twin.waiting_rows == LENGTH - 5
        twin.truncate(20)
        assert twin.waiting_rows == 15
        twin.release()
        with torch.inference_mode():
            contexts.write_waiting([state])
    assert state.waiting_rows == 0
    keys = torch.cat([pools.draft_keys[:, page].transpose(1, 2) for page in state.pages], dim=1)[:, :LENGTH].clone()
    state.release()
    return keys


def test_held_taps_become_the_same_context(llm: LLM) -> None:
    torch.testing.assert_close(decoded(llm, held=True), decoded(llm, held=False), rtol=1e-4, atol=1e-5)


def test_taps_beyond_the_draft_context_are_an_integrity_error(llm: LLM) -> None:
    state = SequenceState(llm.engine.table, PAGE_TOKENS, llm.engine.executor.memory, drafting=True)
    state.start([1, 2, 3], [])
    state.reserve(3)
    state.waiting.append((2, torch.zeros(2, 4)))
    with pytest.raises(IntegrityError, match="taps wait beyond"):
        state.commit(range(3), [], 3)
    state.release()
