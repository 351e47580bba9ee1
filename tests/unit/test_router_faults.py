"""What may go wrong after the router or change under it: loads, engines, files, the models file, the end."""

from __future__ import annotations

import asyncio
import ctypes
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.server.operations.errors_http import as_api_error
from slipstream.server.serving.model_entries import Lease, ModelFailedError, RouterClosedError, UnknownModelError
from slipstream.server.serving.model_files import ModelSpec
from slipstream.server.serving.residency import Resident
from slipstream.server.serving.router import ModelRouter
from slipstream.types import GenEvent
from tests.routing import ONE, answer, run, spec, specs, start, states, until
from tests.tiny import write_pair

pytestmark = pytest.mark.usefixtures("threads")


def test_a_failed_load_keeps_its_reason_and_is_tried_again(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "pair"
    write_pair(broken, seed=1)
    weights = broken / "target" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])

    async def body(router: ModelRouter) -> None:
        async with await router.lease("good"):
            with pytest.raises(ModelFailedError, match="model 'bad' could not be loaded: .*model.safetensors") as first:
                await router.lease("bad")
            assert as_api_error(first.value).status == 503
            weights.write_bytes(whole)
            with pytest.raises(ModelFailedError) as again:
                await router.lease("bad")
            assert str(again.value) == str(first.value)  # the reason is repeated for a while
            info = router.describe()[1]
            assert info.state == "failed" and "model.safetensors" in info.reason
            assert await answer(router, "good") == "good"
            await asyncio.sleep(1.6)
            assert await answer(router, "bad") == "bad"
            assert router.describe()[1].reason == ""

    run(ModelRouter([spec(folder, "good"), spec(broken, "bad")], retry_s=1.5), body)


def test_other_ways_to_fail_have_their_reasons_too(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        for name, reason in (
            ("nowhere", "there is no file '/nowhere/model.gguf'"),
            ("swapped", "no target_layer_ids"),
            ("undrafted", "mode 'chain' needs a drafter"),
        ):
            with pytest.raises(ModelFailedError, match=reason):
                await router.lease(name)
        assert set(states(router).values()) == {"failed"}
        assert router.residents() == []

    offered = [
        ModelSpec("nowhere", "/nowhere/model.gguf"),
        spec(folder, "swapped", str(folder / "target")),
        spec(folder, "undrafted", "auto", defaults={"mode": "chain", "gate": "off"}),
    ]
    run(ModelRouter(offered), body)


def test_a_client_that_leaves_does_not_take_the_load_along(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        leaving, staying = (asyncio.create_task(router.lease("a")) for _ in range(2))
        await until(lambda: states(router)["a"] == "loading")
        leaving.cancel()
        (await staying).release()
        assert states(router)["a"] == "ready" and router.describe()[0].users == 0

    run(ModelRouter(specs(folder, "a")), body)


def kill_thread(lease: Lease) -> None:
    ident = lease.worker.thread.ident
    assert ident is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit)) == 1


def break_step(lease: Lease) -> None:
    def step() -> list[GenEvent]:
        raise RuntimeError("the step is broken")

    lease.llm.engine.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(("kill", "word"), [(kill_thread, "SystemExit"), (break_step, "the step is broken")])
def test_a_dead_engine_is_noticed_and_replaced(folder: Path, kill: Callable[[Lease], None], word: str) -> None:
    deaths: list[str] = []

    async def body(router: ModelRouter) -> None:
        router.on_engine_failed = deaths.append
        async with await router.lease("b") as bystander:
            lease = await router.lease("a")
            first = lease.llm
            running = start(lease, tokens=400)
            kill(lease)
            last = (await running)[-1]
            assert last.finish_reason == "error" and word in (last.error or "")
            lease.release()
            await until(lambda: states(router)["a"] == "failed")  # by the watcher, without a request
            assert word in router.describe()[0].reason and deaths == ["a"]
            async with await router.lease("a") as again:
                assert again.llm is not first
            assert await answer(router, "a") == "a"
            assert (await start(bystander))[-1].finish_reason in ("stop", "length")

    run(ModelRouter(specs(folder, "a", "b"), tick_s=0.05), body)


def test_a_dead_engine_is_noticed_by_the_next_request(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        async with await router.lease("a") as lease:
            break_step(lease)
            await start(lease)
            first = lease.llm
        async with await router.lease("a") as lease:
            assert lease.llm is not first
            assert (await start(lease))[-1].finish_reason in ("stop", "length")

    run(ModelRouter(specs(folder, "a"), tick_s=60), body)


def test_a_deleted_file_is_missed_only_when_it_is_needed(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pair")

    async def body(router: ModelRouter) -> None:
        await answer(router, "a")
        assert router.describe()[0].warning == ""
        shutil.rmtree(tmp_path / "pair")
        assert await answer(router, "a") == "a"
        info = router.describe()[0]
        assert info.state == "ready" and "is gone" in info.warning
        async with await router.lease("a") as lease:
            break_step(lease)
            await start(lease)
        with pytest.raises(ModelFailedError, match="could not be loaded again: there is no file"):
            await router.lease("a")
        assert await answer(router, "b") == "b"

    run(ModelRouter([spec(tmp_path / "pair", "a"), spec(folder, "b")]), body)


def models_file(path: Path, folder: Path, **entries: str) -> None:
    common = f'target = "{folder / "target"}"\nengine = {{weight_format = "fp32", threads = 1, cache_tokens = 1536}}\n'
    tables = [f"[models.{name}]\n{common}{more}" for name, more in entries.items()]
    path.write_text("\n".join(tables))


def test_reload_changes_names_without_cutting_anybody_off(folder: Path, tmp_path: Path) -> None:
    path, plain = tmp_path / "models.toml", 'draft = "none"'
    models_file(path, folder, stays=plain, goes=plain, tuned=plain, rebuilt=plain)

    async def body(router: ModelRouter) -> None:
        names = ("stays", "goes", "tuned", "rebuilt")
        held = {name: await router.lease(name) for name in names}
        running = [start(held["goes"], tokens=120, name="g"), start(held["rebuilt"], tokens=120, name="r")]
        models_file(
            path,
            folder,
            comes=f"{plain}\npreload = true",
            stays=plain,
            tuned=f"{plain}\nrequest = {{temperature = 0.5}}",
            rebuilt=f'draft = "{folder / "draft"}"',
        )
        report = await router.reload()
        assert report == {"added": ["comes"], "removed": ["goes"], "changed": ["tuned", "rebuilt"]}
        assert [info.name for info in router.describe()] == ["comes", "stays", "tuned", "rebuilt"]
        with pytest.raises(UnknownModelError):
            await router.lease("goes")
        for events in await asyncio.gather(*running):
            assert events[-1].finish_reason in ("stop", "length")
        async with await router.lease("tuned") as lease:
            assert lease.spec.defaults == {"temperature": 0.5} and lease.llm is held["tuned"].llm
        async with await router.lease("rebuilt") as lease:
            assert lease.llm.has_draft and lease.llm is not held["rebuilt"].llm
        assert {resident.name for resident in router.residents()} >= {"goes", "rebuilt"}
        for lease in held.values():
            lease.release()
        await until(lambda: "goes" not in {resident.name for resident in router.residents()})
        await until(lambda: states(router)["comes"] == "ready")

    run(ModelRouter.from_file(path), body)


def test_a_bad_file_changes_nothing_and_options_outlive_a_reload(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    models_file(path, folder, a='draft = "none"')

    async def body(router: ModelRouter) -> None:
        await answer(router, "a")
        path.write_text("[models.a]\ntarget = 3")
        with pytest.raises(ConfigError, match="target is 3"):
            await router.reload()
        assert states(router) == {"a": "ready"}
        models_file(path, folder, a='draft = "none"')
        path.write_text('idle_s = 0.1\nmemory_budget = "1K"\n' + path.read_text())
        assert (await router.reload())["changed"] == []
        assert await answer(router, "a") == "a"  # the file's budget would not hold it
        await asyncio.sleep(0.3)
        assert states(router) == {"a": "ready"}  # nor does its idle time put it to sleep

    run(ModelRouter.from_file(path, memory_budget=ONE, idle_s=0, tick_s=0.03), body)
    with pytest.raises(ConfigError, match="no models file"):
        asyncio.run(ModelRouter(specs(folder, "a")).reload())


def test_a_reload_while_the_old_entry_loads_gives_the_new_one(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    models_file(path, folder, a=f'draft = "{folder / "draft"}"')

    async def body(router: ModelRouter) -> None:
        waiting = asyncio.create_task(router.lease("a"))
        await until(lambda: states(router)["a"] == "loading")
        models_file(path, folder, a='draft = "none"')
        await router.reload()
        async with await waiting as lease:
            assert not lease.llm.has_draft and lease.spec.draft == "none"

    run(ModelRouter.from_file(path), body)


def test_start_loads_what_is_wanted_and_survives_what_fails(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        await router.start()
        assert states(router) == {"a": "ready", "bad": "failed", "b": "unloaded"}
        assert router.describe()[0].last_used_ms == 0
        assert await answer(router, "any") == "a"

    offered = [
        spec(folder, "a", preload=True),
        ModelSpec("bad", "/nowhere/model.gguf", preload=True),
        spec(folder, "b"),
    ]
    run(ModelRouter(offered), body)


def test_closing_lets_running_requests_finish_and_refuses_new_ones(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        lease = await router.lease("a")
        running = start(lease, tokens=100)
        closing = asyncio.create_task(router.close(grace_s=30))
        await asyncio.sleep(0)
        with pytest.raises(RouterClosedError) as refused:
            await router.lease("a")
        assert as_api_error(refused.value).status == 503
        assert (await running)[-1].finish_reason in ("stop", "length")
        lease.release()
        await asyncio.wait_for(closing, 5)
        assert router.residents() == []

    run(ModelRouter(specs(folder, "a")), body)


def test_closing_without_patience_ends_what_runs(folder: Path) -> None:
    async def body(router: ModelRouter) -> None:
        lease = await router.lease("a")
        running = start(lease, tokens=400)
        loading = asyncio.create_task(outcome(router.lease("b")))
        await until(lambda: states(router)["b"] == "loading")
        await router.close(grace_s=0.0)
        assert (await running)[-1].finish_reason in ("cancelled", "error")
        lease.release()
        assert isinstance(await loading, RouterClosedError)
        assert router.residents() == []

    run(ModelRouter(specs(folder, "a", "b")), body)


async def outcome(work: Awaitable[object]) -> object:
    try:
        return await work
    except SlipstreamError as error:
        return error


@pytest.mark.parametrize("over", [True, False])
def test_an_engine_is_closed_only_when_its_thread_is_over(over: bool) -> None:
    llm, worker = Mock(), Mock()
    worker.stop.return_value = over
    resident = Resident(Mock(), llm, worker, (), 0)
    resident.unload()
    assert llm.close.called == over and resident.running is None
