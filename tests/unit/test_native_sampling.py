"""The compiled rankings against torch's, and the pruned noise against all of it, to the last bit and the lowest id."""

# mypy: disable-error-code="arg-type, attr-defined, index, unused-ignore"

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.kernels.cpu.native_library import Library
from slipstream.kernels.cpu.ranking import LEAST_TEMPERATURE, NO_BEST, NativeRanking, TorchRanking
from slipstream.kernels.noise import gumbel_rows
from slipstream.types import MAX_SEED
from tests.native import compiled, gumbel_row

HIDDEN = float("-inf")
PLAIN = TorchRanking()
# one lane, less than a vector, a tile and its neighbours, a stretch and its neighbours, real vocabularies
SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 1000, 8192, 8193, 20_000]


class Ranking(NativeRanking):
    """The compiled rankings, and their noise, which they compute only where it can matter."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.gumbel_row = functools.partial(gumbel_row, library)


def ranking(isa: str) -> Ranking:
    return Ranking(compiled(isa))


@pytest.fixture(params=["avx2", "avx512"])
def native(request: pytest.FixtureRequest) -> Ranking:
    return ranking(request.param)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_rows(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def odd_rows(vocab: int) -> dict[str, Tensor]:
    """Rows of edge cases: ties, sorted rows, masks, values far apart, NaN and infinities."""
    few = torch.full((2, vocab), HIDDEN)
    few[0, vocab - 1] = -3.0
    few[1, vocab // 2] = 5.0
    infinite, broken = random_rows(2, vocab, 3), random_rows(2, vocab, 4)
    infinite[1, vocab // 3] = float("inf")
    broken[0, vocab - 1] = float("nan")
    return {
        "equal": torch.full((2, vocab), 1.25),
        "zeros of both signs": torch.zeros(2, vocab) * torch.tensor([1.0, -1.0]).repeat(vocab)[:vocab],
        "rising": torch.arange(2 * vocab, dtype=torch.float32).view(2, vocab),
        "falling": -torch.arange(2 * vocab, dtype=torch.float32).view(2, vocab),
        "ties": random_rows(2, vocab, 1).round(),
        "huge": random_rows(2, vocab, 2, spread=1e30),
        "tiny": random_rows(2, vocab, 2, spread=1e-30),
        "masked": random_rows(2, vocab, 5).masked_fill(random_rows(2, vocab, 6) > -2.0, HIDDEN),
        "few": few,
        "none": torch.full((2, vocab), HIDDEN),
        "infinite": infinite,
        "not numbers": broken,
    }


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.usefixtures("threads")
def test_the_best_token_is_the_first_of_the_largest(native: Ranking, vocab: int) -> None:
    for name, logits in {**odd_rows(vocab), "random": random_rows(9, vocab)}.items():
        ids, usable = native.best_tokens(logits)
        assert usable.tolist() == logits.amax(dim=-1).isfinite().tolist(), name
        first = (logits == logits.amax(dim=-1, keepdim=True)).to(torch.uint8).argmax(dim=-1).tolist()
        expected = [token if use else NO_BEST for token, use in zip(first, usable, strict=True)]
        assert ids.tolist() == expected, name
        assert [part.tolist() for part in PLAIN.best_tokens(logits)] == [expected, usable.tolist()], name


def assert_same_ranking(ours: tuple[NDArray, ...], theirs: tuple[NDArray, ...], places: float, name: str) -> None:
    (values, ids, total), (other_values, other_ids, other_total) = ours, theirs
    assert [part.dtype for part in ours] == [np.float32, np.int64, np.float32] == [part.dtype for part in theirs]
    assert np.array_equal(ids, other_ids), name
    assert values == pytest.approx(other_values, abs=places, rel=1e-6, nan_ok=True), name
    assert total == pytest.approx(other_total, abs=max(places, 3e-5), rel=2e-6, nan_ok=True), name


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.usefixtures("threads")
def test_the_best_scores_and_their_logsumexp(native: Ranking, vocab: int) -> None:
    rows = {**odd_rows(vocab), "random": random_rows(9, vocab)}
    for (name, scores), count in itertools.product(rows.items(), (1, 5, 64)):
        count = min(count, vocab)
        ours = native.top_scores(scores, count, 1.0)
        assert_same_ranking(ours, PLAIN.top_scores(scores, count, 1.0), 0.0, name)
        for row in np.flatnonzero(np.isfinite(ours[2])):
            assert ours[0][row].tolist() == scores[row].sort(descending=True).values[:count].tolist(), name
            exact = scores[row].double().logsumexp(dim=0).item()
            assert ours[2][row] == pytest.approx(exact, abs=5e-6, rel=2e-7), name
    assert not np.isfinite(native.top_scores(odd_rows(vocab)["none"], 1, 1.0)[2]).any()


@pytest.mark.parametrize("temperature", [0.3, 0.8, 7.0])
def test_scores_are_divided_by_the_temperature(native: Ranking, temperature: float) -> None:
    scores = random_rows(5, 10_000)
    ours = native.top_scores(scores, 20, temperature)
    assert_same_ranking(ours, PLAIN.top_scores(scores / temperature, 20, 1.0), 0.0, str(temperature))


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
@pytest.mark.parametrize("position", [0, 77, 2**32 - 1, 2**32, 2**40 + 3])
def test_the_noise_is_that_of_torch(native: Ranking, seed: int, position: int) -> None:
    for vocab in (1, 5, 128, 1003):
        ours = native.gumbel_row(seed, position, vocab)
        theirs = gumbel_rows(seed, range(position, position + 1), vocab)[0].numpy()
        assert ours == pytest.approx(theirs, abs=2e-6, rel=1e-6)


def test_the_noise_of_rare_words_is_that_of_torch(native: Ranking) -> None:
    """Half a million tokens hold words near both ends, where the logarithms are steep."""
    ours = native.gumbel_row(5, 9, 500_000)
    theirs = gumbel_rows(5, range(9, 10), 500_000)[0].numpy()
    assert theirs.max() > 12 and theirs.min() < -2.5
    assert np.allclose(ours, theirs, atol=2e-6, rtol=1e-6)


def all_noise(native: Ranking, logits: Tensor, positions: list[int], seed: int, temperature: float) -> Tensor:
    """Returns every score with its full noise."""
    noise = np.stack([native.gumbel_row(seed, position, logits.shape[1]) for position in positions])
    return logits / temperature + torch.from_numpy(noise)


@pytest.mark.parametrize("temperature", [0.05, 0.8, 3.0, 500.0])
@pytest.mark.parametrize("vocab", [1, 17, 129, 8193, 20_000])
def test_pruning_never_changes_the_choice(native: Ranking, vocab: int, temperature: float) -> None:
    rows = {**odd_rows(vocab), "random": random_rows(2, vocab), "wide": random_rows(2, vocab, 7, 9.0)}
    for (name, logits), (seed, positions) in itertools.product(rows.items(), ((3, [5, 6]), (MAX_SEED, [2**33] * 2))):
        ids, usable = native.noisy_best(logits, positions, seed, temperature)
        assert usable.tolist() == logits.amax(dim=-1).isfinite().tolist(), name
        scores = all_noise(native, logits, positions, seed, temperature)[usable].numpy()
        assert ids[usable].tolist() == scores.argmax(axis=1).tolist(), (name, seed)
        assert (ids[~usable] == NO_BEST).all()


def test_the_lowest_temperature_is_greedy_and_overflow_is_not_usable(native: Ranking) -> None:
    logits = random_rows(3, 3000)
    logits[2] *= 1e9
    for ranked in (native.noisy_best, PLAIN.noisy_best):
        ids, usable = ranked(logits, [1, 2, 3], 0, LEAST_TEMPERATURE)
        assert usable.tolist() == [True, True, False]
        assert ids.tolist() == [*logits[:2].argmax(dim=-1).tolist(), NO_BEST]
    for top in (native.noisy_top, PLAIN.noisy_top):
        assert np.isfinite(top(logits, [1, 2, 3], 0, LEAST_TEMPERATURE, 2)[2]).tolist() == [True, True, False]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 5.0])
def test_many_draws_equal_the_unpruned_ones(native: Ranking, seed: int, spread: float) -> None:
    logits, positions = random_rows(64, 2000, seed, spread), list(range(1000, 1064))
    ids, _ = native.noisy_best(logits, positions, seed, 0.8)
    scores = all_noise(native, logits, positions, seed, 0.8)
    assert ids.tolist() == scores.numpy().argmax(axis=1).tolist()
    assert ids.tolist() == PLAIN.noisy_best(logits, positions, seed, 0.8)[0].tolist()


@pytest.mark.parametrize("vocab", [1, 17, 129, 8193, 20_000])
@pytest.mark.usefixtures("threads")
def test_the_best_noisy_scores_and_their_logsumexp(native: Ranking, vocab: int) -> None:
    rows = odd_rows(vocab)
    for name in ("huge", "rising", "falling"):
        rows[name] = rows[name].clamp(-1e5, 1e5)
    for (name, logits), count in itertools.product({**rows, "random": random_rows(2, vocab)}.items(), (1, 16, 64)):
        count = min(count, vocab)
        values, ids, total = native.noisy_top(logits, [8, 9], 4, 0.8, count)
        scores = all_noise(native, logits, [8, 9], 4, 0.8)
        for row, usable in enumerate(logits.amax(dim=-1).isfinite().tolist()):
            if not usable:
                assert np.isnan(values[row]).all() and np.isnan(total[row]) and (ids[row] == 0).all(), name
                continue
            order = (-scores[row].numpy()).argsort(kind="stable")[:count]
            expected = scores[row].numpy()[order]
            assert np.array_equal(values[row], expected), name
            assert ids[row].tolist() == np.where(np.isneginf(expected), 0, order).tolist(), name
            assert total[row] == pytest.approx(np.logaddexp.reduce(expected.astype(np.float64)), abs=1e-5, rel=2e-7), (
                name
            )
        twin = PLAIN.noisy_top(logits, [8, 9], 4, 0.8, count)
        assert total == pytest.approx(twin[2], abs=3e-5, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("vocab", [50, 9000])
def test_tokens_under_the_floor_are_out_of_the_draw(native: Ranking, vocab: int) -> None:
    logits, positions, temperature = random_rows(12, vocab, 2), list(range(12)), 0.7
    scaled = logits / temperature
    floors = scaled.topk(10, dim=-1).values[:, -1].numpy().copy()
    floors[3], floors[4] = HIDDEN, float(scaled[4].max())
    noise = all_noise(native, torch.zeros_like(logits), positions, 1, 1.0)
    scores = scaled.masked_fill(scaled < torch.from_numpy(floors)[:, None], HIDDEN) + noise
    ids, usable = native.noisy_best(logits, positions, 1, temperature, floors)
    assert usable.all() and ids.tolist() == scores.numpy().argmax(axis=1).tolist()
    assert ids.tolist() == PLAIN.noisy_best(logits, positions, 1, temperature, floors)[0].tolist()
    assert ids[4] == int(scaled[4].argmax())
    values, tokens, total = native.noisy_top(logits, positions, 1, temperature, 20, floors)
    assert_same_ranking(
        (values, tokens, total), PLAIN.noisy_top(logits, positions, 1, temperature, 20, floors), 1e-5, "floors"
    )
    assert np.isneginf(values[0, 10:]).all() and (tokens[0, 10:] == 0).all()
    assert total == pytest.approx(scores.double().topk(20, dim=-1).values.logsumexp(dim=-1).numpy(), abs=1e-5)


def test_both_instruction_sets_give_the_same_bits() -> None:
    old, new = ranking("avx2"), ranking("avx512")
    for vocab in (1003, 49_152):
        rows = {**odd_rows(vocab), "random": random_rows(2, vocab)}
        assert np.array_equal(old.gumbel_row(7, 3, vocab), new.gumbel_row(7, 3, vocab))
        for name, logits in rows.items():
            for first, second in (
                (old.best_tokens(logits), new.best_tokens(logits)),
                (old.top_scores(logits, 32, 0.9), new.top_scores(logits, 32, 0.9)),
                (old.noisy_best(logits, [4, 5], 7, 0.9), new.noisy_best(logits, [4, 5], 7, 0.9)),
                (old.noisy_top(logits, [4, 5], 7, 0.9, 32), new.noisy_top(logits, [4, 5], 7, 0.9, 32)),
            ):
                for a, b in zip(first, second, strict=True):
                    assert np.array_equal(a, b, equal_nan=a.dtype == np.float32), name


@pytest.mark.usefixtures("threads")
def test_a_row_is_its_own_whatever_stands_beside_it(native: Ranking) -> None:
    """Chains, trees that repeat positions, single rows and other numbers of threads give the same bits."""
    logits, positions = random_rows(24, 49_152, 8), [30 + depth for depth in (0, 1, 1, 1, 2, 2, 3, 3) * 3]
    top, noisy = native.top_scores(logits, 16, 0.8), native.noisy_top(logits, positions, 5, 0.8, 16)
    best = native.noisy_best(logits, positions, 5, 0.8)[0]
    assert best.tolist() == noisy[1][:, 0].tolist()
    torch.set_num_threads(1)
    for row in range(24):
        alone = logits[row : row + 1]
        assert all(np.array_equal(a[0], b[row]) for a, b in zip(native.top_scores(alone, 16, 0.8), top, strict=True))
        single = native.noisy_top(alone, positions[row : row + 1], 5, 0.8, 16)
        assert all(np.array_equal(a[0], b[row]) for a, b in zip(single, noisy, strict=True))
        assert native.noisy_best(alone, positions[row : row + 1], 5, 0.8)[0][0] == best[row]


def test_rows_need_not_be_contiguous_or_fp32(native: Ranking) -> None:
    wide = random_rows(4, 600)
    narrow = wide[:, 100:400]
    assert native.best_tokens(narrow)[0].tolist() == narrow.argmax(dim=-1).tolist()
    assert native.best_tokens(narrow.double())[0].tolist() == narrow.argmax(dim=-1).tolist()
    assert native.best_tokens(wide[:0])[0].tolist() == []


def test_every_row_needs_its_position(native: Ranking) -> None:
    with pytest.raises(ValueError, match="2 rows"):
        native.noisy_best(random_rows(2, 50), [1], 0, 1.0)
    with pytest.raises(ValueError, match="2 rows"):
        native.noisy_top(random_rows(2, 50), [1, 2], 0, 1.0, 3, np.zeros(1, np.float32))
