"""Perplexity and agreement: the arithmetic on given predictions, and the forward after them on a tiny model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from slipstream.engine.block_scoring import text_logits
from tests.quality import Prediction, agreement, compare_predictions, perplexity, predictions, row_times, windows
from tests.tiny import VOCAB, prompt, tiny_llm


def test_perplexity_is_the_size_of_a_fair_choice() -> None:
    assert perplexity([Prediction(math.log(1 / 50), 0)] * 7) == pytest.approx(50)
    assert perplexity([Prediction(0.0, 1)]) == 1
    halves = [Prediction(math.log(0.5), 0), Prediction(math.log(0.125), 0)]
    assert perplexity(halves) == pytest.approx(4)
    with pytest.raises(ValueError, match="at least one"):
        perplexity([])


def test_agreement_counts_equal_choices_at_equal_places() -> None:
    mine, theirs = ([Prediction(0.0, best) for best in choices] for choices in ([1, 2, 3, 4], [1, 9, 3, 4]))
    assert agreement(mine, theirs) == 0.75
    with pytest.raises(ValueError, match="shorter"):
        agreement(mine, theirs[:-1])


def test_the_bound_is_relative_and_two_sided() -> None:
    def against(mine: float) -> bool:
        reference = [Prediction(-math.log(10.0), 0)] * 4
        return compare_predictions([Prediction(-math.log(mine), 0)] * 4, reference).holds

    assert against(10.049) and against(9.951) and not against(10.051) and not against(9.949)


def test_windows_cover_the_text_once() -> None:
    ids = list(range(10))
    assert [list(window) for window in windows(ids, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(window) for window in windows(ids, 3)] == [3, 3, 3]  # one token alone predicts nothing


def test_chunks_give_the_logits_of_decoding_token_by_token(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path, draft=False)
    ids = prompt(150)
    whole, chunked, single = (
        torch.cat(list(text_logits(llm.engine.executor.target, ids, chunk))) for chunk in (150, 64, 1)
    )
    assert whole.shape == (150, VOCAB)
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(single, whole, atol=1e-5, rtol=1e-5)


def test_predictions_look_one_token_ahead(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path, draft=False)
    ids = prompt(100)
    seen = list(predictions(llm.engine.executor.target, ids, chunk=33))
    logits = next(text_logits(llm.engine.executor.target, ids, 100))
    expected = torch.log_softmax(logits[:-1].double(), -1)[torch.arange(99), torch.tensor(ids[1:])]
    found = torch.tensor([one.log_probability for one in seen])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert [one.best for one in seen] == logits[:-1].argmax(-1).tolist()
    # what the target itself would write is what it predicts best
    request = llm.request(ids, max_tokens=1, ignore_eos=True)
    assert llm.run([request])[0].token_ids == [int(logits[-1].argmax())]


def test_steps_of_all_widths_are_timed(tmp_path: Path) -> None:
    llm = tiny_llm(tmp_path, draft=False)
    times = row_times(llm.engine.executor.target, (1, 4, 64))
    assert list(times) == [1, 4, 64] and all(0 < ms < 1000 for ms in times.values())
