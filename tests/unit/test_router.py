"""The router over tiny models: loading once, names, sleep, eviction and the memory it is about."""

from __future__ import annotations

import asyncio
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import BusyError, ConfigError, EngineFailedError
from slipstream.server.operations.errors_http import as_api_error
from slipstream.server.serving.model_entries import (
    ModelFailedError,
    NoMemoryNowError,
    NoResidentModelError,
    UnknownModelError,
)
from slipstream.server.serving.residency import private_bytes
from slipstream.server.serving.router import ModelRouter
from tests.routing import ONE, POOL_TOKENS, TWO, answer, run, spec, specs, start, states, until

pytestmark = pytest.mark.usefixtures("threads")


def test_a_model_is_loaded_once_for_many_requests(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        assert states(router) == {"a": "unloaded", "b": "unloaded"}
        leases = await asyncio.gather(*(router.lease("a") for _ in range(5)))
        assert len({id(lease.llm) for lease in leases}) == 1
        assert states(router) == {"a": "ready", "b": "unloaded"}
        assert router.describe()[0].users == 5
        for lease in leases:
            lease.release()
            lease.release()  # twice is once
        assert router.describe()[0].users == 0
        assert await answer(router, "a") == "a"

    run(ModelRouter(specs(folder, "a", "b")), body)


def test_presets_share_a_target_with_their_own_draft_and_mode(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        await asyncio.gather(answer(router, "plain"), answer(router, "drafted"))
        plain, drafted, free = router.describe()
        assert (plain.draft, plain.mode) == (None, "plain")
        assert (drafted.draft, drafted.mode) == ("draft", "chain:4")
        assert (free.draft, free.mode, free.state) == ("draft", "auto", "unloaded")
        async with await router.lease("drafted") as lease:
            assert lease.llm.has_draft and lease.spec.defaults["mode"] == "chain:4"

    draft = str(folder / "draft")
    offered = [
        spec(folder, "plain"),
        spec(folder, "drafted", draft, defaults={"mode": "chain:4"}),
        spec(folder, "free", draft),
    ]
    run(ModelRouter(offered), body)


def test_a_model_without_a_drafter_speculates_from_its_text(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        before = router.describe()
        assert [(info.draft, info.mode, info.draft_variants) for info in before] == [
            ("suffix", "auto", ()),
            ("suffix", "auto", ()),
            ("suffix", "chain", ()),
        ]
        for name in ("asked", "alone"):
            async with await router.lease(name) as lease:
                assert (lease.llm.draft_source, lease.llm.measure_costs()["drafts_ms"]) == ("suffix", {})
        assert router.describe()[:2] != before[:2]
        assert [(info.draft, info.mode, info.state) for info in router.describe()[:2]] == [
            ("suffix", "auto", "ready")
        ] * 2
        with pytest.raises(ModelFailedError, match="mode 'chain' needs a drafter, and there is none"):
            await router.lease("shaped")

    shaped = spec(folder, "shaped", "auto", defaults={"mode": "chain"})
    run(ModelRouter([spec(folder, "asked", "suffix"), spec(folder, "alone", "auto"), shaped]), body)


def test_names_and_any(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        with pytest.raises(UnknownModelError, match="no model 'c'.*a, b"):
            await router.lease("c")
        with pytest.raises(NoResidentModelError, match="a, b"):
            await router.lease("any")
        before = int(time.time() * 1000)
        await answer(router, "a")
        assert await answer(router, "any") == "a"
        await answer(router, "b")
        assert await answer(router, "any") == "b"
        await answer(router, "a")
        assert await answer(router, "any") == "a"
        used = {info.name: info.last_used_ms for info in router.describe()}
        assert before <= used["b"] <= used["a"] <= int(time.time() * 1000)

    run(ModelRouter(specs(folder, "a", "b")), body)
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        ModelRouter(specs(folder, "a", "a"))


def test_idle_models_sleep_and_any_wakes_them_last(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        assert router.describe()[0].last_used_ms == 0
        await answer(router, "a")
        async with await router.lease("b"):
            used = router.describe()[0].last_used_ms
            await until(lambda: states(router)["a"] == "sleeping")
            await asyncio.sleep(0.3)
            assert states(router)["b"] == "ready"  # in use, however long ago that began
            assert router.describe()[0].last_used_ms == used > 0
            assert await answer(router, "any") == "b"
        await until(lambda: states(router) == {"a": "sleeping", "b": "sleeping", "stays": "unloaded"})
        assert router.residents() == []
        assert await answer(router, "any") == "b"
        assert states(router)["b"] == "ready"
        assert await answer(router, "a") == "a"
        assert await answer(router, "stays") == "stays"
        await asyncio.sleep(0.4)
        assert states(router)["stays"] == "ready"

    run(ModelRouter([*specs(folder, "a", "b"), spec(folder, "stays", idle_s=0)], idle_s=0.15, tick_s=0.03), body)


def test_the_least_recently_used_idle_model_makes_room(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        await answer(router, "a")
        await answer(router, "b")
        await answer(router, "a")
        await answer(router, "c")
        assert states(router) == {"a": "ready", "b": "unloaded", "c": "ready"}
        assert {resident.name for resident in router.residents()} == {"a", "c"}
        await answer(router, "b")
        assert states(router) == {"a": "unloaded", "b": "ready", "c": "ready"}

    run(ModelRouter(specs(folder, "a", "b", "c", cache_tokens=POOL_TOKENS), memory_budget=TWO), body)


def test_eviction_waits_for_the_stream_it_would_cut(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        async with await router.lease("a") as lease:
            running = start(lease, tokens=120)
            other = asyncio.create_task(answer(router, "b"))
            await until(lambda: router.describe()[1].progress == "waiting for memory")
            assert states(router) == {"a": "ready", "b": "loading"}
            events = await running
            assert events[-1].finish_reason in ("stop", "length") and not other.done()
        assert await other == "b"
        assert states(router) == {"a": "unloaded", "b": "ready"}

    run(ModelRouter(specs(folder, "a", "b", cache_tokens=POOL_TOKENS), memory_budget=ONE), body)


def test_a_load_that_waits_too_long_is_told_who_holds_the_memory(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        async with await router.lease("a"):
            with pytest.raises(NoMemoryNowError, match=r"'b' needs .* budget .* 'a' \(.*, 1 running\)") as caught:
                await router.lease("b")
            assert as_api_error(caught.value).status == 503 and caught.value.retry_after_s > 0
            assert states(router) == {"a": "ready", "b": "unloaded"}
            assert await answer(router, "a") == "a"
        assert await answer(router, "b") == "b"  # no pause after a refusal: nothing is wrong with it

    run(ModelRouter(specs(folder, "a", "b", cache_tokens=POOL_TOKENS), memory_budget=ONE, room_wait_s=0.2), body)


def test_models_that_do_not_fit_together_all_get_their_turn(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        names = ["a", "b", "c", "a", "b", "c"]
        assert await asyncio.gather(*(answer(router, name) for name in names)) == names

    run(ModelRouter(specs(folder, "a", "b", "c", cache_tokens=POOL_TOKENS), memory_budget=ONE), body)


def test_a_model_is_not_taken_away_before_those_who_waited_for_it_have_it(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        coming = asyncio.create_task(router.lease("a"))
        while not router.residents():
            await asyncio.sleep(0)
        assert not coming.done() and router.describe()[0].users == 0
        router.look_around()
        assert states(router)["a"] == "ready"
        (await coming).release()
        router.look_around()
        assert states(router)["a"] == "sleeping"

    run(ModelRouter(specs(folder, "a"), idle_s=1e-6, tick_s=60), body)


def test_a_budget_cuts_an_automatic_pool_and_refuses_what_can_never_fit(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        async with await router.lease("free") as lease:
            assert lease.llm.config.cache_tokens * 256 <= 1 << 20  # 256 bytes a token
            assert lease.llm.config.cache_tokens >= 512  # a whole context
        with pytest.raises(ModelFailedError, match="'huge' could not be loaded: it needs 10.. MiB, .* budget is 1 MiB"):
            await router.lease("huge")
        assert states(router)["free"] == "ready"

    offered = [spec(folder, "free", cache_tokens=0), spec(folder, "huge", cache_tokens=POOL_TOKENS)]
    run(ModelRouter(offered, memory_budget=1 << 20), body)


def test_a_model_can_be_sent_away_by_hand(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        with pytest.raises(UnknownModelError):
            router.unload("b")
        router.unload("a")  # not there: nothing to do
        coming = asyncio.create_task(router.lease("a"))
        await until(lambda: states(router)["a"] == "loading")
        with pytest.raises(BusyError, match="'a' is being loaded"):
            router.unload("a")
        lease = await coming
        engine = weakref.ref(lease.llm.engine)
        running = start(lease, tokens=60)
        router.unload("a")
        assert states(router)["a"] == "unloaded" and len(router.residents()) == 1
        assert (await running)[-1].finish_reason in ("stop", "length")
        lease.release()
        await until(lambda: router.residents() == [])
        with pytest.raises(EngineFailedError, match="'a' was unloaded"):
            await until(lambda: lease.worker is None)
        await until(lambda: engine() is None)  # although the caller still has the lease object
        with pytest.raises(NoResidentModelError):
            await router.lease("any")

    run(ModelRouter(specs(folder, "a")), body)


def test_a_pool_costs_nothing_until_it_fills_however_many_models_came_before(folder: Path) -> None:
    medium = (24 << 20) * 4 // 256  # four tensors of 24 MiB: of a size glibc likes to keep once one was freed

    async def body(router: ModelRouter) -> None:
        for name in ("a", "b", "a"):
            before = private_bytes()
            await answer(router, name)
            assert private_bytes() - before < 40 << 20

    offered = specs(folder, "a", "b", cache_tokens=medium)
    run(ModelRouter(offered, memory_budget=150 << 20), body)


def test_a_tree_from_the_text_may_be_a_default_without_a_drafter(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        async with await router.lease("a"):
            assert router.describe()[0].mode == "tree:8:text"

    text = replace(spec(folder, "a"), draft="suffix", defaults={"mode": "tree:8:text"})
    run(ModelRouter([text]), body)
