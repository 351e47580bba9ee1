"""Penalties and filters against plain loops, and the promise that a row's token is its own whatever the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from slipstream.kernels.cpu.ranking import NO_BEST, SlotCandidates
from slipstream.kernels.noise import gumbel_rows
from slipstream.speculative.accept import NO_TOKEN
from slipstream.speculative.sampling import RowSampler, filter_floors, filter_logits, log_probabilities
from slipstream.types import Proposal, SamplingParams

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    seed=11,
)


def chain(proposed: Sequence[int]) -> Proposal:
    return Proposal((0, *proposed), tuple(range(-1, len(proposed))))


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def penalised_row(row: Tensor, prompt: list[int], generated: list[int], params: SamplingParams) -> list[float]:
    """One row, one token at a time."""
    result = []
    for token, value in enumerate(row.tolist()):
        if token in prompt or token in generated:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = generated.count(token)
        result.append(value - params.frequency_penalty * count - params.presence_penalty * (count > 0))
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(repetition_penalty=0.7),
        SamplingParams(presence_penalty=1.5),
        SamplingParams(frequency_penalty=0.9),
        SamplingParams(repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.5),
    ],
    ids=str,
)
def test_penalties_count_the_prompt_the_answer_and_the_proposals_before_each_row(params: SamplingParams) -> None:
    vocab, prompt, answer, proposed = 12, [1, 1, 5], [2, 2, 5], [3, 3, 2, 7]
    for seed in range(20):
        logits = random_logits(5, vocab, seed, spread=1.0)
        sampler = RowSampler(params, vocab, prompt, share_noise=True)
        sampler.observe(answer[:2])
        sampler.observe(answer[2:])
        chosen = sampler.choose(logits, 10, chain(proposed))
        for row in range(5):
            expected = penalised_row(logits[row], prompt, answer + proposed[:row], params)
            assert int(chosen[row]) == max(range(vocab), key=expected.__getitem__)


def test_proposals_leave_no_trace_unless_they_are_committed() -> None:
    params, logits = SamplingParams(presence_penalty=2.0), torch.tensor([[1.0, 0.9, 0.0]])
    sampler = RowSampler(params, 3, [2], share_noise=True)
    sampler.choose(logits.expand(3, -1), 0, chain([0, 0]))
    assert sampler.choose(logits, 0).tolist() == [0]
    sampler.observe([0])
    assert sampler.choose(logits, 0).tolist() == [1]


def kept_by_hand(row: list[float], params: SamplingParams) -> set[int]:
    """min-p, then top-k, then top-p over what is left, in fp64; no two values of the row are equal."""
    left = sorted(range(len(row)), key=lambda token: -row[token])
    if params.min_p > 0:
        left = [token for token in left if row[token] >= row[left[0]] + math.log(params.min_p)]
    if params.top_k:
        left = left[: params.top_k]
    total = math.fsum(math.exp(row[token]) for token in left)
    mass, kept = 0.0, set()
    for token in left:
        kept.add(token)
        mass += math.exp(row[token]) / total
        if mass >= params.top_p:
            break
    return kept


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=500),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=1.0),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(min_p=0.1, top_p=0.7),
        SamplingParams(top_k=9, top_p=0.9, min_p=0.2),
        SamplingParams(),
    ],
    ids=lambda p: f"k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_filters_keep_what_a_plain_loop_keeps(params: SamplingParams) -> None:
    logits = random_logits(6, 300, seed=5)
    filtered = filter_logits(logits, params)
    for row in range(6):
        kept = set(filtered[row].isfinite().nonzero().flatten().tolist())
        assert kept == kept_by_hand(logits[row].tolist(), params)
        assert torch.equal(filtered[row][list(kept)], logits[row][list(kept)]), "what is kept is not changed"


def test_a_nucleus_larger_than_the_first_guess() -> None:
    logits = random_logits(3, 5000, seed=6, spread=0.1)
    logits[1, 17] = 30.0  # a row whose nucleus is one token, in the company of flat ones
    filtered = filter_logits(logits, SamplingParams(top_p=0.9))
    sizes = filtered.isfinite().sum(dim=-1).tolist()
    assert sizes[1] == 1
    for row in (0, 2):
        expected = kept_by_hand(logits[row].tolist(), SamplingParams(top_p=0.9))
        assert len(expected) > 4000
        different = set(filtered[row].isfinite().nonzero().flatten().tolist()) ^ expected
        assert len(different) <= 2, "thousands of fp32 terms may move the edge by a token"


def test_a_filter_never_hides_every_token() -> None:
    for logits in (torch.zeros(2, 3000), random_logits(2, 3000)):
        for params in (SamplingParams(top_p=1e-9, top_k=1, min_p=1.0), SamplingParams(top_p=0.999999)):
            assert bool(filter_logits(logits, params).isfinite().any(dim=-1).all())


@pytest.mark.parametrize("vocab", [50, 5000, 49152])
@pytest.mark.parametrize(
    "params", [EVERYTHING, SamplingParams(top_p=0.9), SamplingParams(top_p=0.3, min_p=0.001)], ids=["all", "p", "pm"]
)
def test_filtered_rows_of_a_batch_equal_single_rows_bit_for_bit(vocab: int, params: SamplingParams) -> None:
    logits = random_logits(16, vocab, seed=7) / 0.8
    together = filter_logits(logits, params)
    for row in range(16):
        assert torch.equal(filter_logits(logits[row : row + 1], params)[0], together[row])


@pytest.mark.parametrize(
    "params",
    [
        EVERYTHING,
        SamplingParams(top_k=1),
        SamplingParams(top_k=64),
        SamplingParams(top_k=65),
        SamplingParams(top_k=999),
        SamplingParams(min_p=0.02),
        SamplingParams(min_p=1e-4, top_p=0.9),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=0.999),
        SamplingParams(top_k=300, min_p=0.1, top_p=0.8),
        SamplingParams(top_k=64, top_p=0.99),
        SamplingParams(),
    ],
    ids=lambda p: f"k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
@pytest.mark.parametrize("vocab", [30, 64, 3000])
def test_the_floor_of_a_row_is_what_its_filters_keep(params: SamplingParams, vocab: int) -> None:
    """Peaked, flat, tied and masked rows in one batch: some need the whole vocabulary, others their best few."""
    logits = torch.cat([random_logits(2, vocab, 5, spread) for spread in (0.01, 1.0, 3.0, 9.0)])
    logits = torch.cat([logits, logits[4:6].round(), torch.zeros(1, vocab)])
    logits[5, 7:] = float("-inf")
    floors = filter_floors(logits, params, 0.8)
    kept = logits / 0.8 >= torch.from_numpy(floors)[:, None]
    expected = filter_logits(logits / 0.8, params).isfinite()
    assert torch.equal(kept & logits.isfinite(), expected)
    for row in range(len(logits)):
        assert filter_floors(logits[row : row + 1], params, 0.8)[0] == floors[row], "a floor depends on its row only"


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch splits some sums over its threads; one thread would hide it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_the_edge_of_a_nucleus_does_not_depend_on_the_batch() -> None:
    """top_p is put exactly on a token's cumulated mass, where a difference in the last bit shows."""
    for seed in range(6):
        logits = random_logits(16, 49152, seed)
        total = torch.log_softmax(logits, dim=-1).amax(dim=-1) - logits.amax(dim=-1)
        mass = (logits.topk(64, dim=-1).values + total[:, None]).exp().cumsum(dim=-1)
        for row in range(16):
            params = SamplingParams(top_p=float(mass[row, 40]))
            together = filter_logits(logits[[row, row - 1]], params)[0].isfinite()
            alone = filter_logits(logits[row : row + 1], params)[0].isfinite()
            assert torch.equal(alone, together)
            pair, single = (filter_floors(logits[rows], params, 1.0) for rows in ([row, row - 1], [row]))
            assert pair[0] == single[0]


def choices(params: SamplingParams, logits: Tensor, text: list[int], widths: list[int]) -> list[int]:
    """Samples `text`'s successors in groups of rows: each group is an anchor and the right proposals after it."""
    sampler = RowSampler(params, logits.shape[1], [1, 2, 3], share_noise=True)
    chosen: list[int] = []
    for width in widths:
        start = len(chosen)
        proposal = chain(text[start : start + width - 1])
        chosen += sampler.choose(logits[start : start + width], 100 + start, proposal).tolist()
        sampler.observe(chosen[start : start + width])
    return chosen


@pytest.mark.parametrize("vocab", [60, 5000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_a_seed_gives_the_same_tokens_however_rows_are_grouped(vocab: int, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, top_p=0.95, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, seed=5
    )
    logits = random_logits(24, vocab, seed=8, spread=1.0)
    plain = choices(params, logits, [], [1] * 24)
    for widths in ([24], [16, 8], [5, 1, 7, 11], [2] * 12):
        assert choices(params, logits, plain, widths) == plain
    if temperature:
        other = SamplingParams(temperature=temperature, top_p=0.95, seed=6)
        assert choices(other, logits, [], [1] * 24) != plain


def test_the_token_is_the_largest_scaled_logit_with_its_noise() -> None:
    params = SamplingParams(temperature=0.7, seed=3)
    logits = random_logits(4, 40)
    chosen = RowSampler(params, 40, [0], share_noise=True).choose(logits, 9, chain([1, 2, 3])).tolist()
    assert chosen == (logits / 0.7 + gumbel_rows(3, range(9, 13), 40)).argmax(dim=-1).tolist()


def candidates(sampler: RowSampler, logits: Tensor, first_position: int, count: int) -> SlotCandidates:
    found = sampler.draft_candidates(logits, first_position, count)
    assert found is not None
    return found


def drafted(sampler: RowSampler, logits: Tensor, first_position: int) -> Tensor:
    return torch.from_numpy(candidates(sampler, logits, first_position, 1).tokens[:, 0])


def test_a_draft_shares_the_targets_noise_when_asked() -> None:
    params, logits = SamplingParams(temperature=1.0, seed=3), random_logits(50, 40, spread=0.5)
    sharing, greedy = (RowSampler(params, 40, [0], share_noise=share) for share in (True, False))
    target = torch.from_numpy(sharing.choose(logits, 9, chain([0] * 49)))
    assert torch.equal(drafted(sharing, logits, 9), target), "the same logits must be accepted whole"
    assert torch.equal(drafted(greedy, logits, 9), logits.argmax(dim=-1))
    assert not torch.equal(drafted(greedy, logits, 9), target)
    assert greedy.choose(logits, 9, chain([0] * 49)).tolist() == target.tolist(), "drafting changes no text"


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.5, seed=3), EVERYTHING], ids=str)
def test_candidates_are_the_likeliest_tokens_under_the_targets_rule(params: SamplingParams, share: bool) -> None:
    logits = random_logits(5, 300)
    sampler = RowSampler(params, 300, [4, 5], share_noise=share)
    sampler.observe([6, 6])
    found = candidates(sampler, logits, 9, 12)
    rows = [penalised_row(row, [4, 5], [6, 6], params) for row in logits] if params.penalised else logits.tolist()
    scores = torch.tensor(rows)
    if not params.greedy:
        scores = filter_logits(scores / params.temperature, params)
        scores = scores + gumbel_rows(params.seed, range(9, 14), 300) if share else scores
    best = scores.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    kept = best.values[:, :12].isfinite()
    assert bool(kept[:, 0].all()) and found.tokens.shape == found.scores.shape == (5, 12)
    assert torch.equal(torch.from_numpy(found.tokens)[kept], best.indices[:, :12][kept])
    expected = best.values[:, :12]
    if share and not params.greedy:  # with noise a claim is a share among the candidates
        expected = expected.log_softmax(dim=-1)
    assert found.scores == pytest.approx(expected.numpy(), abs=1e-4)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.5, seed=3), EVERYTHING], ids=str)
def test_one_unit_of_a_draft_logit_is_worth_the_scale_in_a_candidates_score(params: SamplingParams) -> None:
    """Heads add to the scores what they would have added to the logits."""
    logits = random_logits(1, 40, spread=0.2).abs() + 1.0  # above zero, where a repetition penalty divides
    sampler = RowSampler(params, 40, [39], share_noise=True)
    token = int(logits[0].argmax())
    lifted = logits.clone()
    lifted[0, token] += 0.25
    scores: list[dict[int, float]] = []
    for drafts in (candidates(sampler, logits, 9, 40), candidates(sampler, lifted, 9, 40)):
        scores.append({int(t): float(s) for t, s in zip(drafts.tokens[0], drafts.scores[0], strict=True) if s > -99})
    other = next(t for t in scores[0] if t != token and t in scores[1])  # the total moved, for all alike
    gains = [after - before for before, after in ((scores[0][t], scores[1][t]) for t in (token, other))]
    assert gains[0] - gains[1] == pytest.approx(0.25 * sampler.draft_scale, abs=1e-5)


def random_tree(rows: int, vocab: int, seed: int) -> Proposal:
    source = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, row, (), generator=source)) for row in range(1, rows)]
    return Proposal(tuple(torch.randint(0, vocab, (rows,), generator=source).tolist()), tuple(parents))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=5),
        EVERYTHING,
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3),
    ],
    ids=["greedy", "noise", "everything", "penalties"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_a_tree_chooses_what_it_would_with_its_ancestors_committed(params: SamplingParams, seed: int) -> None:
    vocab, answer = 25, [2, 2, 5]
    proposal, logits = random_tree(24, vocab, seed), random_logits(24, vocab, seed, spread=1.0)
    assert proposal.branching
    sampler = RowSampler(params, vocab, [1, 5], share_noise=True)
    sampler.observe(answer)
    chosen = sampler.choose(logits, 70, proposal).tolist()
    assert chosen == sampler.choose(logits, 70, proposal).tolist(), "choosing commits nothing"
    for row in range(24):
        ancestors: list[int] = []
        at = row
        while at > 0:
            ancestors.insert(0, proposal.tokens[at])
            at = proposal.parents[at]
        plain = RowSampler(params, vocab, [1, 5], share_noise=True)
        plain.observe([*answer, *ancestors])
        assert chosen[row] == int(plain.choose(logits[row : row + 1], 70 + len(ancestors))[0]), row


def test_siblings_share_their_noise() -> None:
    """Noise goes by depth and not by row: equal logits at equal depth give equal tokens."""
    params = SamplingParams(temperature=1.0, seed=8)
    logits = random_logits(1, 300, spread=0.1).expand(7, -1)
    star = Proposal(tuple(range(7)), (-1, 0, 0, 0, 1, 1, 2))
    chosen = RowSampler(params, 300, [0], share_noise=True).choose(logits, 9, star).tolist()
    assert chosen[1] == chosen[2] == chosen[3] and chosen[4] == chosen[5] == chosen[6]
    assert len(set(chosen)) == 3, "another depth, other noise"


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING, SamplingParams(temperature=0.7)], ids=str)
@pytest.mark.parametrize("bad", ["nan", "inf", "all hidden"])
def test_a_row_that_is_no_number_has_no_token_and_leaves_the_others_alone(params: SamplingParams, bad: str) -> None:
    logits = random_logits(6, 40)
    healthy = RowSampler(params, 40, [1], share_noise=True).choose(logits, 5, chain([1] * 5)).tolist()
    spoiled = logits.clone()
    if bad == "all hidden":
        spoiled[3] = float("-inf")
    else:
        spoiled[3, 17] = float(bad)
    seen = RowSampler(params, 40, [1], share_noise=True).choose(spoiled, 5, chain([1] * 5)).tolist()
    assert seen == [*healthy[:3], NO_TOKEN, *healthy[4:]]


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING, SamplingParams(temperature=0.7)], ids=str)
def test_minus_infinity_is_a_mask_and_not_an_error(params: SamplingParams) -> None:
    logits = random_logits(4, 40)
    logits[:, 10:] = float("-inf")
    sampler = RowSampler(params, 40, [1], share_noise=True)
    assert all(0 <= token < 10 for token in sampler.choose(logits, 5, chain([1, 2, 3])).tolist())
    drafts = candidates(sampler, logits, 5, 20)
    assert bool((drafts.tokens < 10).all()) and not bool((drafts.scores != drafts.scores).any())
    assert bool((drafts.scores[:, 10:] == float("-inf")).all()) and bool((drafts.scores[:, 0] > -5).all())


@pytest.mark.parametrize("params", [SamplingParams(), EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_draft_that_is_no_number_has_no_candidates(params: SamplingParams, bad: float) -> None:
    logits = random_logits(4, 40)
    sampler = RowSampler(params, 40, [1], share_noise=True)
    assert sampler.draft_candidates(logits, 5, 3) is not None
    logits[2, 11] = bad
    assert sampler.draft_candidates(logits, 5, 3) is None


def test_a_temperature_too_low_for_fp32_is_greedy() -> None:
    logits = random_logits(4, 40)
    for temperature in (1e-30, 1e-45, 1e-300):
        sampler = RowSampler(SamplingParams(temperature=temperature, seed=2), 40, [1], share_noise=True)
        assert sampler.choose(logits, 5, chain([1, 2, 3])).tolist() == logits.argmax(dim=-1).tolist()
        assert torch.equal(drafted(sampler, logits, 5), logits.argmax(dim=-1))


def test_the_kernels_and_the_verdicts_mean_the_same_by_no_token() -> None:
    assert NO_BEST == NO_TOKEN


def test_sampling_follows_the_filtered_softmax() -> None:
    params = SamplingParams(temperature=1.5, top_k=5, seed=21)
    row = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, -9.0, -8.0])
    sampler = RowSampler(params, 7, [0], share_noise=True)
    chosen = sampler.choose(row.expand(20_000, -1), 0, chain([0] * 19_999))
    counts = torch.bincount(torch.from_numpy(chosen), minlength=7).double()
    expected = filter_logits(row[None].double() / 1.5, params).softmax(dim=-1)[0] * 20_000
    assert counts[5:].sum() == 0
    assert ((counts - expected) ** 2 / expected)[:5].sum().item() < 18.5, "4 degrees of freedom, one in a thousand"


@pytest.mark.parametrize("top", [0, 1, 5])
def test_log_probabilities_are_those_of_the_unmodified_target(top: int) -> None:
    logits = random_logits(6, 30)
    tokens = torch.tensor([0, 5, 29, 3, 3, 7])
    chosen, values, ids = log_probabilities(logits, tokens, top)
    for row in range(6):
        table = [value - math.log(math.fsum(map(math.exp, logits[row].tolist()))) for value in logits[row].tolist()]
        best = sorted(range(30), key=lambda token: -table[token])[:top]
        assert chosen[row].item() == pytest.approx(table[int(tokens[row])], abs=1e-5)
        assert ids[row].tolist() == best
        assert values[row].tolist() == pytest.approx([table[token] for token in best], abs=1e-5)


def test_log_probabilities_of_a_row_do_not_depend_on_the_batch() -> None:
    logits = random_logits(16, 49152)
    tokens = logits.argmax(dim=-1)
    together = log_probabilities(logits, tokens, 3)
    for row in (0, 7, 15):
        alone = log_probabilities(logits[row : row + 1], tokens[row : row + 1], 3)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))
