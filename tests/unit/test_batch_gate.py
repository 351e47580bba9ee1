"""The gate of a batch, with the clock of simulated worlds: it loses next to nothing, whatever drafts do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from slipstream.speculative.gates import BatchGate

SHORT, LONG = 256, 8_000  # steps: one answer, and very many


@dataclass(frozen=True)
class World:
    """What steps yield: a plain step takes a second and gives each sequence one token; the fields describe drafts."""

    tokens: float  # that one sequence gets in a drafted step, on average
    seconds: float  # that a drafted step takes
    noise: float = 0.03  # relative deviation of every time

    def drawn(self, batch: int, luck: random.Random) -> int:
        """Behind every token there is another with the same chance: many steps give one, a few give lots."""
        further = 1.0 - 1.0 / self.tokens
        tokens = batch
        for _ in range(batch):
            while luck.random() < further:
                tokens += 1
        return tokens


@dataclass
class Run:
    """A gate in a world, asked for the next step before the last has been told, as the engine does.

    Two runs of the same seed are disturbed at the same steps, whatever they choose.
    """

    gate: BatchGate
    batch: int
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0

    def steps(self, count: int, world: World | Callable[[int], World]) -> Run:
        clock, luck = random.Random(self.seed), random.Random(self.seed + 1)
        flying = self.gate.drafts(self.batch)
        for number in range(count):
            now = world if isinstance(world, World) else world(number)
            ahead = self.gate.drafts(self.batch)
            late = (8.0 if clock.random() < 0.001 else 1.0) * clock.uniform(1.0, 1.0 + 2 * now.noise)
            tokens, seconds = (now.drawn(self.batch, luck), now.seconds * late) if flying else (self.batch, late)
            self.tokens += tokens
            self.seconds += seconds
            self.drafted += flying
            self.gate.observe(self.batch, flying, 4 if flying else 1, tokens / self.batch, seconds)
            flying = ahead
        return self

    @property
    def rate(self) -> float:
        """Tokens of a sequence per second; plain decoding has about one."""
        return self.tokens / self.batch / self.seconds


class Always(BatchGate):
    """No gate at all."""

    def __init__(self, drafting: bool) -> None:
        super().__init__()
        self._drafting = drafting

    def drafts(self, batch: int) -> bool:
        return self._drafting


def rate(gate: BatchGate, batch: int, steps: int, world: World | Callable[[int], World], seed: int = 0) -> float:
    return Run(gate, batch, seed).steps(steps, world).rate


WORSE = [World(1.5, 4.5), World(1.6, 2.0), World(1.95, 2.0), World(1.0, 1.3)]


@pytest.mark.parametrize("batch", [4, 16, 64])
@pytest.mark.parametrize("world", WORSE)
def test_where_drafts_never_pay_next_to_nothing_is_lost(batch: int, world: World) -> None:
    run = Run(BatchGate(), batch).steps(3000, world)
    assert run.rate > 0.985 * rate(Always(False), batch, 3000, world)
    assert run.drafted > 4  # it looks again now and then


@pytest.mark.parametrize("batch", [16, 64])
@pytest.mark.parametrize("world", WORSE)
def test_the_first_look_of_a_short_run_counts_as_well(batch: int, world: World) -> None:
    rates = [rate(BatchGate(), batch, SHORT, world, seed) for seed in range(12)]
    plain = [rate(Always(False), batch, SHORT, world, seed) for seed in range(12)]
    assert sum(rates) > 0.98 * sum(plain)


@pytest.mark.parametrize("period", [6, 12])
def test_long_steps_that_drafting_has_again_and_again_count(period: int) -> None:
    def world(number: int) -> World:
        return World(1.8, 1.5 + (1.0 * period if number % period == 0 else 0.0))

    assert rate(Always(True), 64, 3000, world) < 0.75 * rate(Always(False), 64, 3000, world)
    assert rate(BatchGate(), 64, 3000, world) > 0.97 * rate(Always(False), 64, 3000, world)


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("world", [World(2.9, 1.3), World(2.0, 1.5), World(5.0, 1.6)])
def test_where_drafts_pay_they_are_used(batch: int, world: World) -> None:
    assert rate(BatchGate(), batch, 3000, world) > 0.97 * rate(Always(True), batch, 3000, world)


@pytest.mark.parametrize("batch", [1, 16])
def test_it_follows_a_world_that_changes(batch: int) -> None:
    bad, good = World(1.2, 2.0), World(3.0, 1.2)
    gate = BatchGate()
    for world in (bad, good, bad, good):
        Run(gate, batch).steps(2500, world)
        share = Run(gate, batch).steps(500, world).drafted / 500
        assert share < 0.05 if world is bad else share > 0.9

    def swinging(number: int) -> World:
        return good if number // 2000 % 2 else bad

    assert rate(BatchGate(), batch, LONG, swinging) > 1.2 * rate(Always(False), batch, LONG, swinging)


def test_one_long_step_decides_nothing() -> None:
    gate, world = BatchGate(), World(4.0, 1.2)
    Run(gate, 1).steps(60, world)
    gate.observe(1, True, 4, 4, 2000.0)
    assert Run(gate, 1).steps(60, world).drafted > 50


def test_a_step_that_nobody_times_does_not_stop_a_look() -> None:
    """The first drafted step of a size captures its graph, which says nothing about drafting."""
    gate, world = BatchGate(), World(4.0, 1.2)
    told = 0
    for _ in range(90):
        drafting = gate.drafts(8)
        told += drafting
        if told != 1 or not drafting:
            gate.observe(8, drafting, 4 if drafting else 1, 4 if drafting else 1, world.seconds if drafting else 1.0)
    assert told > 30


def test_sizes_are_judged_apart_and_neighbours_together() -> None:
    gate, well, badly = BatchGate(), World(4.0, 1.2), World(2.0, 9.0)
    Run(gate, 1).steps(100, well)
    Run(gate, 64).steps(100, badly)
    assert Run(gate, 1).steps(40, well).drafted > 30
    # 50 sequences take the graphs of 64, and start with what those have shown
    assert Run(gate, 50).steps(40, badly).drafted == 0
