"""Tiny models run on one thread: sharing their work out costs more than the work."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.node.get_closest_marker("e2e") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
