"""The noise is Philox4x32-10 to the bit, Gumbel in distribution, and a pure function of (seed, position, token)."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.kernels.noise import gumbel_rows, philox
from slipstream.types import MAX_SEED

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    batch = [torch.tensor([0, word, 5]) for word in counter]
    assert tuple(int(word[1]) for word in philox(batch, key)) == words


def reference_gumbel(seed: int, position: int, token: int) -> float:
    """One number with Python's own integers and floats."""
    c = [token // 4, position & ONES, position >> 32, 0]
    k0, k1 = seed & ONES, seed >> 32
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k0, second & ONES, (first >> 32) ^ c[3] ^ k1, first & ONES]
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    uniform = min((c[token % 4] + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-uniform))


@pytest.mark.parametrize("seed", [0, 1, 2**32, MAX_SEED])
@pytest.mark.parametrize("start", [0, 77, 2**32 - 1])
def test_every_value_is_the_one_its_seed_position_and_token_say(seed: int, start: int) -> None:
    rows = gumbel_rows(seed, range(start, start + 3), 10)
    expected = [[reference_gumbel(seed, start + row, token) for token in range(10)] for row in range(3)]
    assert rows.shape == (3, 10) and rows.dtype == torch.float32
    assert torch.allclose(rows.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_rows(1234, range(100), 4000).flatten().double()
    count = noise.numel()
    assert bool(noise.isfinite().all())
    assert abs(noise.mean().item() - 0.5772156649) < 5 * math.sqrt(math.pi**2 / 6 / count)
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    ranked = noise.sort().values
    law = (-(-ranked).exp()).exp()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((law - steps[:-1]).abs().max(), (steps[1:] - law).abs().max()).item()
    assert distance < 1.95 / math.sqrt(count), "Kolmogorov-Smirnov at one in a thousand"


def test_neighbouring_rows_tokens_and_seeds_are_uncorrelated() -> None:
    rows = gumbel_rows(9, range(50), 4000)
    other = gumbel_rows(10, range(50), 4000)
    for a, b in ((rows[:-1], rows[1:]), (rows[:, :-1], rows[:, 1:]), (rows, other), (rows[:, :-4], rows[:, 4:])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].item()
        assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_rows_do_not_depend_on_how_positions_are_grouped() -> None:
    whole = gumbel_rows(42, range(5, 25), 101)
    for start, stop in ((5, 6), (5, 13), (13, 25), (24, 25)):
        assert torch.equal(gumbel_rows(42, range(start, stop), 101), whole[start - 5 : stop - 5])
    assert torch.equal(gumbel_rows(42, range(5, 25), 50), whole[:, :50]), "nor on the size of the vocabulary"


@pytest.mark.parametrize("by", ["position", "seed"])
def test_the_largest_sum_of_logit_and_noise_is_a_softmax_sample(by: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, -0.5])
    draws = 20_000 if by == "position" else 1500
    if by == "position":
        noise = gumbel_rows(99, range(draws), 8)
    else:
        noise = torch.cat([gumbel_rows(seed, range(17, 18), 8) for seed in range(draws)])
    counts = torch.bincount((logits + noise).argmax(dim=-1), minlength=8).double()
    expected = logits.double().softmax(dim=0) * draws
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 24.3, "7 degrees of freedom, one in a thousand"
