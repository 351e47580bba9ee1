"""A sample of the check that a weight format predicts text like the same file in fp32."""

from __future__ import annotations

import pytest

from slipstream.config import WeightFormat
from tests.checks_cpu import quality

TOKENS = 512
pytestmark = pytest.mark.e2e


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weight_format", ["auto", "int4"])
def test_a_format_predicts_like_fp32(weight_format: WeightFormat) -> None:
    seen = quality((weight_format,), TOKENS)[weight_format]
    assert seen.tokens == TOKENS - 1 and 3 < seen.reference < 30
    # A sample this short varies more than the full text, whose bound is 0.5 %.
    assert abs(seen.difference) < 0.01 and seen.agreement > 0.95
