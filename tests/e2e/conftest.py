"""A server that several modules share, because each start loads a model and measures the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Server, serve


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """A server of the default pair without any option."""
    with serve() as running:
        yield running
