"""Many clients of one real server: texts, counts and leftovers (the verification runs this at full size)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import checks_server as promises
from tests.e2e.serving import Server

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with promises.small_server(queue=16) as running:
        yield running


def test_requests_in_a_crowd_answer_as_each_does_alone(server: Server) -> None:
    seen = promises.crowd(server, 12)
    assert seen.ok, seen.row()


def test_load_with_disconnects_leaves_nothing_behind(server: Server) -> None:
    seen = promises.load(server, clients=40, tokens=16, seconds=3.0, warm_up=3.0)
    assert seen.ok, seen.row()
    assert seen.refused, "there are more clients than slots and places in the queue, so some must have been refused"
