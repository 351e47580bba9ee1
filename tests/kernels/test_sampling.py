"""Tokens and candidates chosen on the device equal the host sampler's and do not depend on neighbouring rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from slipstream.kernels.gpu import token_choice as sampling
from slipstream.kernels.gpu.filters import MOST_GATHERED, find_floors
from slipstream.kernels.gpu.token_choice import RankingScratch, SamplingSettings
from slipstream.kernels.noise import gumbel_rows
from slipstream.speculative.sampling import RowSampler, filter_floors
from slipstream.types import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY = 4500  # more than one stretch, and no whole number of them
KERNELS = pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, seed=2**40 + 5)
HOT = SamplingParams(temperature=3.0, seed=7)
FILTERS = [
    SamplingParams(temperature=0.9, seed=11, top_k=20),
    SamplingParams(temperature=1.1, seed=12, top_p=0.8),
    SamplingParams(temperature=0.7, seed=13, min_p=0.02),
    SamplingParams(temperature=1.3, seed=14, top_k=50, top_p=0.6, min_p=0.01),
    SamplingParams(temperature=1.0, seed=15, min_p=0.001, top_p=0.7),
    SamplingParams(temperature=1.0, seed=16, top_k=1),
]


def settings_of(params: list[SamplingParams], shared: bool = True) -> SamplingSettings:
    settings = SamplingSettings.empty(len(params), DEVICE)
    for sequence, own in enumerate(params):
        settings.temperature[sequence], settings.seed[sequence] = own.temperature, own.seed or 0
        settings.top_k[sequence], settings.top_p[sequence] = own.top_k, own.top_p
        settings.min_p[sequence], settings.shared[sequence] = own.min_p, shared
    return settings


def random_logits(seed: int, rows: int, vocabulary: int = VOCABULARY, spread: float = 3.0) -> Tensor:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(seed)) * spread


def chosen(logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, kernel: bool = True) -> list[int]:
    rows, vocabulary = logits.shape
    out = torch.full((rows,), -99, dtype=torch.int32, device=DEVICE)
    call = sampling.choose if kernel else sampling.choose_reference
    call(logits.to(DEVICE), positions.to(DEVICE), settings, each, out, poisoned(rows, vocabulary, 1))
    return out.tolist()


def candidates(
    logits: Tensor, positions: Tensor, settings: SamplingSettings, each: int, count: int, kernel: bool = True
) -> tuple[Tensor, Tensor]:
    rows, vocabulary = logits.shape
    tokens = torch.full((rows, count), -99, dtype=torch.int32, device=DEVICE)
    scores = torch.full((rows, count), float("nan"), device=DEVICE)
    call = sampling.top_candidates if kernel else sampling.top_candidates_reference
    scratch = poisoned(rows, vocabulary, count)
    call(logits.to(DEVICE), positions.to(DEVICE), settings, each, 0, tokens, scores, scratch)
    return tokens.cpu(), scores.cpu()


def poisoned(rows: int, vocabulary: int, count: int) -> RankingScratch:
    scratch = RankingScratch.empty(rows, vocabulary, count, DEVICE)
    filters = scratch.filters
    for part in (
        filters.floors,
        filters.peaks,
        filters.cuts,
        filters.masses,
        filters.few,
        scratch.best,
        scratch.peaks,
        scratch.sums,
    ):
        part.fill_(float("nan"))
    filters.counts.fill_(2**30)
    scratch.listed.fill_(2**62)
    return scratch


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@triton.jit
def _noise_kernel(out, seed, position, first, GROUPS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    noise = sampling.gumbel_noise(tl.load(seed), tl.load(position), first // GROUP + tl.arange(0, GROUPS), GROUP)
    tl.store(out + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :], noise)


@pytest.mark.parametrize(("seed", "position", "first"), [(0, 0, 0), (2**63 - 2, 2**31 - 9, 4096), (2**40 + 1, 77, 64)])
def test_the_noise_is_the_hosts(seed: int, position: int, first: int) -> None:
    out = torch.full((4096,), float("nan"), device=DEVICE)
    _noise_kernel[(1,)](out, torch.tensor([seed], device=DEVICE), numbers(position).to(DEVICE), first, 64, 64)
    wanted = gumbel_rows(seed, range(position, position + 1), first + 4096)[0, first:]
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-6, atol=1e-6)


@KERNELS
@pytest.mark.parametrize("params", [[GREEDY, WARM, HOT], FILTERS[:3], FILTERS[3:]], ids=["plain", "one", "several"])
def test_the_hosts_tokens_are_chosen(params: list[SamplingParams], kernel: bool) -> None:
    logits = random_logits(len(params) + params[0].top_k, 6)
    logits[:, ::7] = float("-inf")
    positions = numbers(5, 6, 900, 901, 40, 41)
    got = chosen(logits, positions, settings_of(params), 2, kernel)
    for row, token in enumerate(got):
        sampler = RowSampler(params[row // 2], VOCABULARY, (), share_noise=True)
        assert token == sampler.choose(logits[row : row + 1], int(positions[row]) + 1)[0]


@KERNELS
@pytest.mark.parametrize(
    ("params", "shared", "count"),
    [
        ([GREEDY, WARM, HOT], True, 8),
        ([GREEDY, WARM, HOT], False, 1),
        ([*FILTERS[:2], FILTERS[3]], True, 64),
        ([*FILTERS[1:3], FILTERS[4]], False, 5),
    ],
)
def test_the_hosts_candidates_are_ranked(params: list[SamplingParams], shared: bool, count: int, kernel: bool) -> None:
    logits = random_logits(count, 3)
    positions = numbers(5, 60, 700)
    tokens, scores = candidates(logits, positions, settings_of(params, shared), 1, count, kernel)
    for row, own in enumerate(params):
        sampler = RowSampler(own, VOCABULARY, (), share_noise=shared)
        wanted = sampler.draft_candidates(logits[row : row + 1], int(positions[row]), count)
        assert wanted is not None
        assert tokens[row].tolist() == wanted.tokens[0].tolist()
        own_scores, host_scores = scores[row].cpu(), torch.from_numpy(wanted.scores[0])
        if shared and not own.greedy:
            # The host leaves the noise of all other tokens out of the sum, which a GPU draws anyway.
            assert own_scores.exp().sum() < (0.999 if own in (WARM, HOT) else 1.0 + 1e-5)
            own_scores, host_scores = own_scores - own_scores[0], host_scores - host_scores[0]
        torch.testing.assert_close(own_scores, host_scores, rtol=1e-5, atol=1e-5)


@KERNELS
def test_equals_go_to_the_lowest_id(kernel: bool) -> None:
    logits = torch.full((2, VOCABULARY), -1.0)
    logits[0, [4400, 3000, 77, 4097]] = 2.0
    logits[1, 4099] = 0.0
    logits[1, [900, 4200]] = -0.0
    settings = settings_of([GREEDY])
    assert chosen(logits, numbers(0, 1), settings, 2, kernel) == [77, 900]
    tokens, _ = candidates(logits, numbers(0, 1), settings, 2, 5, kernel)
    assert tokens.tolist() == [[77, 3000, 4097, 4400, 0], [900, 4099, 4200, 0, 1]]


@KERNELS
def test_rows_that_are_not_numbers_have_no_token(kernel: bool) -> None:
    logits = random_logits(3, 4)
    logits[0, 4200], logits[1, 10], logits[2] = float("nan"), float("inf"), float("-inf")
    for params in (GREEDY, FILTERS[3]):
        settings = settings_of([params])
        got = chosen(logits, numbers(1, 2, 3, 4), settings, 4, kernel)
        assert got[:3] == [-1, -1, -1] and got[3] >= 0
        _, scores = candidates(logits, numbers(1, 2, 3, 4), settings, 4, 2, kernel)
        assert scores[:3].isnan().all() and scores[3, 0].isfinite()


@KERNELS
def test_places_that_nothing_fills_are_marked(kernel: bool) -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, [4300, 12]] = torch.tensor([0.5, 0.25])
    tokens, scores = candidates(logits, numbers(9), settings_of([WARM], shared=False), 1, 4, kernel)
    assert tokens.tolist() == [[4300, 12, 0, 0]]
    assert scores[0, 2:].isneginf().all() and scores[0, :2].exp().sum() == pytest.approx(1.0, abs=1e-6)


def found_floor(logits: Tensor, params: SamplingParams) -> float:
    scratch = poisoned(1, logits.shape[1], 1).filters
    settings = settings_of([params])
    find_floors(logits.to(DEVICE), settings.temperature, settings.top_k, settings.top_p, settings.min_p, 1, scratch)
    return float(scratch.floors[0])


@pytest.mark.parametrize("share", [0.3, 0.97])
def test_a_nucleus_of_thousands_ends_where_the_hosts_does(share: float) -> None:
    logits = random_logits(4, 1, 9000, spread=0.5)
    ranked = logits[0].sort(descending=True).values
    inside = int((ranked.double().softmax(dim=0).cumsum(dim=0) < share).sum())
    floor = found_floor(logits, SamplingParams(temperature=1.0, seed=21, top_p=share))
    kept = int((logits[0] >= floor).sum())
    assert inside > 1000 and abs(kept - inside) <= 2  # sums of thousands of numbers differ in their last bits


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=21, top_p=0.005),
        SamplingParams(temperature=2.0, seed=21, top_k=20),
        SamplingParams(temperature=1.0, seed=21, top_k=100, top_p=0.5, min_p=0.01),
    ],
    ids=["top-p", "top-k", "all"],
)
def test_more_equals_than_can_be_gathered_are_found_all_the_same(params: SamplingParams) -> None:
    logits = torch.full((1, MOST_GATHERED + 900), 1.5)
    logits[0, 50:90] = torch.linspace(2.0, 4.0, 40)
    assert found_floor(logits, params) == float(filter_floors(logits, params, params.temperature)[0])


def test_a_top_k_of_more_than_there_are_numbers_keeps_them_all() -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 40:60] = torch.linspace(-1.0, 1.0, 20)
    assert found_floor(logits, FILTERS[3]) > -1.0
    assert found_floor(logits, SamplingParams(temperature=1.0, seed=1, top_k=30)) == float("-inf")


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, positions = random_logits(5, 3), numbers(8, 9, 10)
    settings = settings_of([FILTERS[3], WARM, GREEDY])
    tokens, scores = candidates(logits, positions, settings, 1, 4)
    other = random_logits(6, 8)
    other[5] = logits[1]
    more = settings_of([HOT, GREEDY, WARM, FILTERS[1]])
    tokens_among, scores_among = candidates(other, numbers(1, 2, 3, 4, 5, 9, 6, 7), more, 2, 4)
    assert torch.equal(tokens_among[5], tokens[1]) and torch.equal(scores_among[5], scores[1])
