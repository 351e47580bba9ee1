"""One real server for the tests of connections, bodies, prompts and grammars: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Server, serve

FILES = 320  # files that the server may open; 160 of them are for connections


@pytest.fixture(scope="session")
def door_server() -> Iterator[Server]:
    with serve(files=FILES) as running:
        yield running
