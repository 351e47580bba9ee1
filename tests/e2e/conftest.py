"""What several modules share: a server, because each start loads a model, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.serving import Server, serve
from tests.fakes import cli

__all__ = ["cli"]


@pytest.fixture(scope="session")
def default_server() -> Iterator[Server]:
    """A server of the default pair without any option."""
    with serve() as running:
        yield running


@pytest.fixture
def as_json(cli: Any) -> Any:
    """Runs a verb with --json in this process, which has imported torch already, and returns what it prints."""

    def run(*arguments: str) -> Any:
        done = cli(*arguments, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run
