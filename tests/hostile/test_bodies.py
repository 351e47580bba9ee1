"""The worst known bodies at the size limit, beside one stream, on a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.e2e.serving import MODEL, Server
from tests.hostile.bodies import Worst, table
from tests.hostile.neighbour import GROWTH_LIMIT, Neighbour, beside

pytestmark = pytest.mark.e2e

SIZE = 4 << 20
CHAT = "/v1/chat/completions"
# Of the server's processor time between two pieces of the neighbour's stream: ten times what the verification allows on
# the wall clock of an idle machine. Without the limits on bodies it was 20 s and more.
SILENCE_LIMIT_MS = 2500.0
TABLE = table(SIZE)


def chosen() -> list[Worst]:
    """All bodies for one endpoint, and some specific ones for every other; the verification sends the whole table."""
    mine = [worst for worst in TABLE if worst.bounded_by == "the door"]
    found = [worst for worst in mine if worst.path == CHAT]
    for path in dict.fromkeys(worst.path for worst in mine if worst.path != CHAT):
        found += [worst for worst in mine if worst.path == path and not worst.general][:2]
    return found


@pytest.fixture
def server(door_server: Server) -> Server:
    return door_server


@pytest.fixture(scope="module")
def neighbour(door_server: Server) -> Iterator[Neighbour]:
    with Neighbour(door_server, door_server.cpu_seconds) as running:
        yield running


def test_every_endpoint_has_its_worst_body(server: Server) -> None:
    listed = {(verb.upper(), path) for path, verbs in server.get("/openapi.json")["paths"].items() for verb in verbs}
    sent = {(worst.method, re.sub(f"/({MODEL}|nothing)", "/{name}", worst.path)) for worst in TABLE}
    assert listed == sent


@pytest.mark.parametrize("worst", chosen(), ids=lambda worst: worst.label)
def test_no_body_silences_a_neighbour_or_takes_much_memory(server: Server, neighbour: Neighbour, worst: Worst) -> None:
    seen = beside(server, neighbour, worst)
    assert seen.statuses == ((worst.refused,) if worst.refused is not None else seen.statuses)
    assert 200 <= seen.statuses[0] < 500
    assert seen.silence_ms < SILENCE_LIMIT_MS, seen.row()
    assert seen.growth <= GROWTH_LIMIT, seen.row()


def test_several_at_once_take_turns(server: Server, neighbour: Neighbour) -> None:
    worst = next(worst for worst in TABLE if worst.path == CHAT and worst.name == "strings within the limit")
    seen = beside(server, neighbour, worst, at_once=8)
    assert set(seen.statuses) <= {400, 503} and 400 in seen.statuses
    assert seen.silence_ms < SILENCE_LIMIT_MS, seen.row()
    assert seen.growth <= GROWTH_LIMIT, seen.row()


def test_a_program_of_the_largest_size_is_a_text(server: Server) -> None:
    program = 'call({"x": [1, 2, 3]}, "\\"");\n'
    body = json.dumps({"content": program * (SIZE // 60), "model": "none"})
    assert server.ask("/tokenize", body.encode())[0] == 404  # the body is read and checked; its model does not exist
