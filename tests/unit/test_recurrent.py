"""Recurrent states: the state always is that of the kept rows' tokens, and no slot or checkpoint is lost or leaked."""

# mypy: disable-error-code="arg-type, assignment, index, unused-ignore"

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream.cache.cpu.page_pools import KvPools, PoolShape
from slipstream.cache.cpu.state_tensors import StateTensors, Stretch
from slipstream.cache.pages import OutOfPages, PageTable
from slipstream.cache.prefix import PrefixCache
from slipstream.cache.recurrent import RecurrentState, StatePool, page_key
from slipstream.cache.sequence import SequenceState
from slipstream.config import EngineConfig
from slipstream.engine.pool_sizes import StateRoom
from slipstream.engine.scheduler import ScheduledSequence, Scheduler, SchedulerLimits
from slipstream.errors import IntegrityError
from slipstream.kernels.cpu.delta_rule import DeltaShape
from slipstream.types import Request
from tests.deltas import SHAPE, Rows

PAGE = 4


def make_pools(pages: int = 16, slots: int | None = None, stride: int = 1, kept_rows: int = 10**6) -> KvPools:
    pools = KvPools(pages, PAGE, PoolShape(((1, 2),), SHAPE), None, slots, stride)
    assert pools.state_tensors is not None
    pools.state_tensors.most_kept_rows = kept_rows
    return pools


class Sequences:
    """Sequences over the same pools, with rows of an imaginary model in which a token alone decides the inputs."""

    def __init__(self, pools: KvPools, pages: int = 16) -> None:
        self.table, self.pools, self.model = PageTable(pages), pools, Rows(SHAPE)

    def begin(self, tokens: Sequence[int] = (), cached: Sequence[int] = ()) -> SequenceState:
        state = SequenceState(self.table, PAGE, self.pools, False)
        state.start(tokens, cached)
        return state

    def run(self, *works: tuple[SequenceState, Sequence[int], Sequence[int] | None]) -> list[Tensor]:
        tensors = self.pools.state_tensors
        assert isinstance(tensors, StateTensors)
        stretches = []
        for state, rows, parents in works:
            state.reserve(state.length + len(rows))
            assert state.recurrent is not None
            stretches.append(Stretch(state.recurrent, len(rows), parents, state.checkpoint_rows(len(rows))))
        return self.model.run(tensors.begin(stretches), [row for _, rows, _ in works for row in rows])

    def extend(self, state: SequenceState, tokens: Sequence[int]) -> None:
        """Computes tokens one by one and keeps them."""
        for token in tokens:
            self.run((state, [token], None))
            state.tokens[state.length :] = []
            state.tokens.append(token)
            state.commit([0], [], 0)

    def state(self, state: SequenceState) -> tuple[Tensor, Tensor]:
        tensors = self.pools.state_tensors
        assert tensors is not None and state.recurrent is not None and state.recurrent.slot is not None
        return tensors.windows[state.recurrent.slot].clone(), tensors.memories[state.recurrent.slot].clone()

    def assert_same(self, one: SequenceState, tokens: Sequence[int]) -> None:
        """The state is, bit for bit, that of a sequence computed from its tokens one by one."""
        fresh = self.begin()
        self.extend(fresh, tokens)
        for ours, theirs in zip(self.state(one), self.state(fresh), strict=True):
            assert torch.equal(ours, theirs)
        fresh.release()

    def held(self, *states: SequenceState) -> None:
        assert self.pools.states is not None
        slots = [state.recurrent.slot for state in states if state.recurrent is not None]
        self.pools.states.check([slot for slot in slots if slot is not None], self.table)


def random_tree(rng: random.Random, rows: int) -> tuple[int, ...]:
    return (-1, *(rng.randrange(max(0, row - 3), row) for row in range(1, rows)))


@pytest.mark.parametrize("kept_rows", [0, 10**6])
def test_a_committed_path_leaves_the_state_of_its_tokens(kept_rows: int) -> None:
    """Chains and trees of sequences of different lengths in one step; any path stays, none included."""
    rng = random.Random(kept_rows)
    for turn in range(6):
        world = Sequences(make_pools(64, kept_rows=kept_rows), 64)
        states = [world.begin() for _ in range(3)]
        for state in states:
            world.extend(state, [rng.randrange(50) for _ in range(rng.randrange(6))])
        works = []
        for state in states:
            rows = rng.randrange(1, 12)
            works.append((state, [rng.randrange(50) for _ in range(rows)], rng.choice([None, random_tree(rng, rows)])))
        world.run(*works)
        for item, (state, rows, parents) in enumerate(works):
            path, node = [], rng.randrange(-1, len(rows)) if turn or item else -1
            while node >= 0:
                path.append(node)
                node = node - 1 if parents is None else parents[node]
            path.reverse()
            before = state.tokens[: state.length]
            state.tokens = before + [rows[row] for row in path]
            state.commit(path, [], 0)
            world.assert_same(state, state.tokens)


def test_rows_nobody_ran_cannot_be_kept() -> None:
    world = Sequences(make_pools())
    state = world.begin([1, 2, 3])
    state.reserve(3)
    with pytest.raises(IntegrityError, match="no forward"):
        state.commit(range(3), [], 0)


def test_a_step_that_is_voided_leaves_the_state_alone() -> None:
    world = Sequences(make_pools())
    state = world.begin()
    world.extend(state, [4, 5])
    world.run((state, [6, 7, 8], None))
    state.commit([], [], 0)
    world.assert_same(state, [4, 5])
    with pytest.raises(IntegrityError):
        state.commit([0], [9], 0)


def test_a_state_out_of_step_is_noticed() -> None:
    world = Sequences(make_pools())
    state = world.begin()
    world.extend(state, [4, 5])
    assert state.recurrent is not None
    state.recurrent.length = 1
    with pytest.raises(IntegrityError, match="recurrent state stands at 1, the target at 2"):
        state.check()


def test_forks_go_their_own_ways() -> None:
    world = Sequences(make_pools())
    state = world.begin()
    world.extend(state, range(6))
    twin = state.fork()
    world.extend(state, [10, 11])
    world.extend(twin, [20, 21, 22])
    world.assert_same(state, [*range(6), 10, 11])
    world.assert_same(twin, [*range(6), 20, 21, 22])
    world.held(state, twin)
    state.release()
    twin.release()
    world.held()
    world.table.check([])


def test_a_refused_fork_changes_nothing() -> None:
    world = Sequences(make_pools(slots=1, stride=0))
    state = world.begin()
    world.extend(state, range(6))
    free = world.table.free
    with pytest.raises(OutOfPages):
        state.fork()
    assert world.table.free == free
    world.held(state)


# ---- checkpoints


def test_a_chunk_leaves_states_behind_the_pages_that_are_worth_it() -> None:
    """Checkpoints are kept at every second page, where prompts part, and at the last page until it is published."""
    world = Sequences(make_pools(stride=2))
    assert world.pools.states is not None
    has = world.pools.states.has
    state = world.begin()
    state.branch = 3 * PAGE
    world.run((state, range(21), None))
    state.tokens = list(range(21))
    state.commit(range(21), [], 0)

    def pages() -> list[int]:
        return [page for page in range(1, len(state.pages) + 1) if has(page_key(world.table, state.pages[page - 1]))]

    assert pages() == [2, 3, 4, 5]
    world.extend(state, range(21, 26))
    assert pages() == [2, 3, 4, 6], "the fifth page's state went along"
    world.table.share([state.pages[4]])
    world.extend(state, range(26, 30))
    assert pages() == [2, 3, 4, 6, 7]
    world.table.release([state.pages[4]])
    world.held(state)
    state.release()
    assert world.pools.states.checkpoints == []


@pytest.mark.parametrize("kept_rows", [0, 10**6])
def test_truncation_goes_back_to_a_kept_state(kept_rows: int) -> None:
    world = Sequences(make_pools(stride=2, kept_rows=kept_rows))
    state = world.begin()
    world.run((state, range(19), None))
    state.tokens = list(range(19))
    state.commit(range(19), [], 0)
    state.truncate(14)
    assert (state.length, state.tokens, len(state.pages)) == (8, list(range(14)), 2)
    state.check()
    world.assert_same(state, range(8))
    state.truncate(7)
    assert state.length == 0
    world.assert_same(state, [])
    world.held(state)


def test_a_prefix_resumes_at_the_last_page_whose_state_was_kept() -> None:
    world = Sequences(make_pools(stride=2))
    prefix = PrefixCache(world.table, PAGE, world.pools.states)
    first = world.begin()
    world.run((first, range(14), None))
    first.tokens = list(range(14))
    first.commit(range(14), [], 0)
    prefix.put(first.tokens, first.pages, None)
    first.release()
    world.held()
    tokens = [*range(10), 70, 71, 72]
    pages = prefix.take(tokens, None)
    assert (len(pages), prefix.last_match) == (2, 2 * PAGE)
    second = world.begin(tokens, pages)
    assert second.length == 8
    world.assert_same(second, range(8))
    long = [*range(14), 3, 3, 3, 3]
    pages = prefix.take(long, None)
    assert len(pages) == 3, "the end of a prompt has a state too"
    prefix.give_back(pages)
    second.release()
    prefix.clear()
    world.held()
    world.table.check([])


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    """The first sequence kept no state there; the second computes those pages again and keeps one in their place."""
    world = Sequences(make_pools(32, stride=100), 32)
    prefix = PrefixCache(world.table, PAGE, world.pools.states)
    found = []
    for turn in range(3):
        tokens = [*range(8), *[50 + turn] * 9]
        pages = prefix.take(tokens, None)
        found.append(len(pages))
        state = world.begin(tokens, pages)
        state.branch = prefix.last_match
        start = state.length
        world.run((state, tokens[start:], None))
        state.commit(range(len(tokens) - start), [], 0)
        world.assert_same(state, tokens)
        prefix.put(tokens, state.pages, None)
        state.release()
    assert found == [0, 0, 2]
    prefix.clear()
    world.held()


def test_checkpoints_give_way_and_sequences_do_not() -> None:
    world = Sequences(make_pools(slots=2))
    pool = world.pools.states
    assert pool is not None
    first = world.begin()
    world.extend(first, range(9))
    assert pool.checkpoints == [page_key(world.table, first.pages[1])], "the older of two made room"
    second = world.begin()
    assert (pool.checkpoints, pool.available) == ([], 0)
    world.extend(first, range(9, 13))
    assert pool.checkpoints == []
    with pytest.raises(OutOfPages):
        world.begin()
    world.held(first, second)


def test_a_checkpoint_that_is_used_outlives_an_older_one() -> None:
    world = Sequences(make_pools(slots=4))
    pool = world.pools.states
    assert pool is not None
    first = world.begin()
    world.extend(first, range(8))
    used, unused = (page_key(world.table, page) for page in first.pages[:2])
    world.table.share(first.pages[:1])
    second = world.begin(range(5), first.pages[:1])
    third = world.begin()
    assert pool.has(used) and not pool.has(unused)
    world.held(first, second, third)


def test_the_last_slot_is_the_checkpoints_own() -> None:
    world = Sequences(make_pools(slots=2))
    first = world.begin()
    world.extend(first, range(4))
    pages = first.pages[:1]
    world.table.share(pages)
    second = world.begin([0, 1, 2, 3, 9], pages)
    assert world.pools.states is not None and world.pools.states.available == 0
    ours, theirs = world.state(second), world.state(first)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    world.held(first, second)


def test_leaks_and_stale_checkpoints_are_noticed() -> None:
    world = Sequences(make_pools())
    state = world.begin()
    world.extend(state, range(5))
    assert world.pools.states is not None
    with pytest.raises(IntegrityError, match="holders"):
        world.pools.states.check([], world.table)
    world.table.release(state.pages)
    with pytest.raises(IntegrityError, match="not the same any more"):
        world.held(state)


# ---- which sequence gets a slot


def ticket(world: Sequences, name: str, tokens: int = 3) -> ScheduledSequence:
    request = Request(name, tuple(range(tokens)))
    return ScheduledSequence(request, SequenceState(world.table, PAGE, world.pools, False), tokens + 4, None, 4)


def test_a_sequence_waits_for_a_slot_and_takes_a_paused_ones() -> None:
    world = Sequences(make_pools(slots=2, stride=0))
    scheduler: Scheduler[ScheduledSequence] = Scheduler(
        world.table, None, PAGE, SchedulerLimits(4, 8, 8, 16), world.pools.states
    )
    tickets = [ticket(world, name) for name in "abc"]
    for one in tickets:
        scheduler.add(one)
    scheduler.admit()
    assert [one.request.id for one in scheduler.running] == ["a", "b"]
    scheduler.check()
    scheduler.pause(tickets[0])
    scheduler.admit()
    assert [one.request.id for one in scheduler.running] == ["b", "c"]
    assert tickets[0].phase == "paused-evicted"
    scheduler.check()
    for one in tickets:
        scheduler.finish(one)
    scheduler.check()
    assert world.pools.states is not None and world.pools.states.available == 2


def test_checkpoints_take_no_more_room_than_their_keys() -> None:
    config = EngineConfig(max_sequences=3)
    large = DeltaShape(layers=48, key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4)
    assert large.state_bytes == 48 * 4 * (3 * 10240 + 48 * 128 * 128)
    room = StateRoom.plan(large, config, 131072)
    assert room.stride == -(-large.state_bytes // (64 * 131072)) and room.token_bytes <= 131072
    assert room.slots(10 * room.stride) == 10 + 6 and room.reserved_bytes == 6 * large.state_bytes
    small = StateRoom.plan(SHAPE, config, 131072)
    assert small.stride == 1
    assert StateRoom.plan(large, EngineConfig(prefix_cache=False, max_sequences=3), 131072).slots(100) == 6
    assert StateRoom.plan(None, config, 131072).slots(100) == 0


def test_who_writes_a_state_beside_the_one_it_reads_stands_in_two_slots() -> None:
    """As on a GPU: a state counts once its step has landed, and a sequence with a state too far ahead must end."""
    tensors = StateTensors(5, SHAPE)
    pool, pages = StatePool(5, tensors, 1, per_sequence=2), PageTable(2)
    pages.allocate(1)
    state = RecurrentState(pool)
    state.start(None, 0)
    assert state.slot is not None and pool.available == 1
    before, behind = state.slot, state.spare_slot
    tensors.memories[before], tensors.memories[behind] = 1.0, 2.0
    state.land(3)  # this step is dropped, and another one follows
    state.land(2)
    pool.remember(page_key(pages, 0), state.after([0]))
    assert pool.checkpoints == [] and state.slot == before
    pool.remember(page_key(pages, 0), state.after([0, 1]))
    state.commit([0, 1])
    assert (state.slot, state.spare_slot, state.length) == (behind, before, 2)
    twin = RecurrentState(pool)
    twin.start(page_key(pages, 0), 4)
    assert twin.slot is not None and tensors.memories[twin.slot].eq(2.0).all() and pool.available == 0
    lent = pool.lend()  # takes the checkpoint's slot
    assert lent is not None and pool.checkpoints == [] and pool.lend() is None
    pool.release(lent)
    pool.check([*state.held, *twin.held], pages)
    twin.release()
    state.land(3)
    state.commit([0])
    with pytest.raises(IntegrityError, match="not known"):
        state.land(1)
    state.release()
    pool.check([], pages)
    assert pool.available == 2
