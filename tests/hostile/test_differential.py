"""A few seeds of the differential test, and faults that the test must find."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.cache.cpu.page_pools import KvPools
from slipstream.engine.scheduler import ScheduledSequence
from slipstream.speculative.sampling import RowSampler
from slipstream.types import Proposal
from tests import differential


@pytest.mark.parametrize(
    ("world", "texts", "rare"),
    [
        ("llama", 90, None),
        ("recurrent", 60, "accepted from the text"),
        ("llama-suffix", 60, "adapters"),
        ("recurrent-suffix", 60, "adapters"),
    ],
)
def test_random_company_changes_no_text(world: str, texts: int, rare: str | None) -> None:
    report = differential.run_world(world, texts, seed=0)
    assert report.ok, "\n".join(report.different[:3])
    assert set(report.idle) <= {rare}, f"never happened: {report.idle}"


@pytest.mark.e2e
def test_random_company_changes_no_text_of_the_real_pair() -> None:
    report = differential.run_world("smollm2", 18, seed=0)
    assert report.ok, "\n".join(report.different[:3])


def later_noise(patch: pytest.MonkeyPatch) -> None:
    """Makes verified rows use the noise of the position after their own."""
    choose = RowSampler.choose

    def shifted(self: RowSampler, logits: Any, first: int, proposal: Proposal | None = None) -> Any:
        return choose(self, logits, first + bool(proposal is not None and proposal.nodes), proposal)

    patch.setattr(RowSampler, "choose", shifted)


def kept_rows_stay_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Leaves the kept rows of a tree where they are instead of moving them together."""
    patch.setattr(KvPools, "move_rows", lambda *places: None)


def a_restored_sequence_lacks_a_token(patch: pytest.MonkeyPatch) -> None:
    """Computes a paused sequence that lost its pages again without its last token but one."""
    kept: Any = vars(ScheduledSequence)["kept_tokens"]  # the descriptor of the field

    def keep(ticket: ScheduledSequence, tokens: tuple[int, ...]) -> None:
        kept.__set__(ticket, (*tokens[:-2], tokens[-1]) if tokens and ticket.generated > 1 else tokens)

    patch.setattr(ScheduledSequence, "kept_tokens", property(kept.__get__, keep))


@pytest.mark.parametrize("fault", [later_noise, kept_rows_stay_where_they_are, a_restored_sequence_lacks_a_token])
def test_a_fault_is_found_and_the_seed_is_named(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    report = differential.run_world("llama", 120, seed=0)
    assert not report.ok and "--world llama --seed " in report.different[0]
