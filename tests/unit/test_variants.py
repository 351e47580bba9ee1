"""Variants of the drafter on tiny pairs: which one drafts for a request, what they share, and how they come and go."""

# mypy: disable-error-code="assignment, attr-defined, operator, union-attr, unused-ignore"

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.cache.sequence import SequenceState
from slipstream.config import PAGE_TOKENS, WeightFormat
from slipstream.engine.executor import RowWork
from slipstream.engine.llm import LLM
from slipstream.errors import RequestError
from slipstream.kernels.cpu.linear import Matrix, NativeMatrix
from slipstream.kernels.cpu.native_library import library
from slipstream.models.dflash import DFlashDrafter
from slipstream.speculative.policy import SequencePolicy
from slipstream.stats import RequestStats
from slipstream.types import Proposal, Request, StepRecord, Verdict
from tests.adapters import write_random_adapter
from tests.tiny import ask, assert_idle, mixed_requests, prompt, tiny_llm

# what each adapter touches; only the first leaves the draft context alone
MODULES = {"voice": ("q_proj", "o_proj", "mlp"), "keys": ("k_proj", "v_proj"), "taps": ("fc", "mlp.up_proj")}
FORMATS: list[WeightFormat] = ["int8"] if library() is None else ["int8", "native"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    return {
        name: f"{name}={write_random_adapter(made / name, folder / 'draft', modules, seed=number, size=2.0)}"
        for number, (name, modules) in enumerate(MODULES.items(), start=1)
    }


@pytest.fixture
def adapted(folder: Path, sources: dict[str, str]) -> LLM:
    llm = tiny_llm(folder, weight_format="int8")
    for source in sources.values():
        llm.add_draft_lora(source)
    return llm


def drafter_of(llm: LLM, name: str) -> DFlashDrafter:
    return llm.engine.executor.variants[name].drafter.drafter


def run(llm: LLM, requests: Sequence[Request]) -> dict[str, tuple[list[int], list[StepRecord], RequestStats]]:
    """Tokens, steps and numbers of requests that run together."""
    for request in requests:
        llm.engine.add(request)
    tokens: dict[str, list[int]] = {request.id: [] for request in requests}
    steps: dict[str, list[StepRecord]] = {request.id: [] for request in requests}
    stats = {}
    while llm.engine.has_work:
        for event in llm.engine.step():
            tokens[event.request_id] += [token.id for token in event.tokens]
            if event.step is not None:
                steps[event.request_id].append(event.step)
            if event.stats is not None:
                stats[event.request_id] = event.stats
    return {name: (tokens[name], steps[name], stats[name]) for name in tokens}


def seen(steps: Sequence[StepRecord]) -> list[object]:
    return [(step.position, step.proposal, step.verdict) for step in steps]


def sharing(adapted: LLM, name: str, ids: tuple[int, ...]) -> int:
    request = replace(ask(f"{name} again", ids, max_tokens=2), draft_lora=name)
    return run(adapted, [request])[request.id][2].cached_tokens


# ---- drafting


@pytest.mark.parametrize(("mode", "weight_format"), [("chain", FORMATS[-1]), ("tree:16", FORMATS[0])])
def test_in_a_mixed_batch_everybody_drafts_as_alone(
    folder: Path, sources: dict[str, str], mode: str, weight_format: WeightFormat
) -> None:
    names = ["base", *sources]
    kinds = [replace(request, max_tokens=16) for request in mixed_requests(mode) if request.id in ("b", "d")]
    requests = {
        (kind.id, name): replace(kind, id=f"{kind.id}-{name}", draft_lora=name) for kind in kinds for name in names
    }
    together = tiny_llm(folder, weight_format=weight_format)
    for source in sources.values():
        together.add_draft_lora(source)
    mixed = run(together, list(requests.values()))
    drafted: dict[str, list[object]] = {}
    for name in names:
        alone = tiny_llm(folder, weight_format=weight_format)
        if name != "base":
            alone.add_draft_lora(sources[name])
        own = [requests[kind.id, name] for kind in kinds]
        for request in own:
            (tokens, steps, stats), (wanted, wanted_steps, _) = mixed[request.id], run(alone, [request])[request.id]
            assert tokens == wanted and seen(steps) == seen(wanted_steps)
            assert stats.draft_lora == name
        drafted[name] = [step.proposal for request in own for step in mixed[request.id][1]]
    for kind in kinds:
        plain = replace(kind, mode=replace(kind.mode, kind="plain", width=0))
        wanted = run(together, [plain])[kind.id]
        assert wanted[2].draft_lora is None
        assert all(mixed[f"{kind.id}-{name}"][0] == wanted[0] for name in names), "drafts never change the text"
    assert all(drafted[a] != drafted[b] for a in names for b in names if a < b), "the variants draft differently"
    assert_idle(together)


@torch.inference_mode()
def test_taps_that_wait_become_their_own_variants_context(adapted: LLM) -> None:
    """Sequences whose taps were held get what each would have got at once and alone; a fork stays with its variant."""
    engine, contexts, tokens = adapted.engine, adapted.engine.contexts, list(prompt(9, 1))

    def context(names: Sequence[str], held: bool) -> list[torch.Tensor]:
        states = [SequenceState(engine.table, PAGE_TOKENS, engine.executor.memory, True, name) for name in names]
        for state in states:
            state.start(tokens, [])
            state.reserve(len(tokens))
        result = engine.executor.forward([RowWork(state, 0, tokens, 0) for state in states])
        if held:
            for item in range(len(states)):
                contexts.hold(result, item, range(len(tokens)))
                states[item].commit(range(len(tokens)), [], len(tokens))
            states = [state.fork() for state in states]
            contexts.write_waiting(states)
        else:
            contexts.write(result, [(item, range(len(tokens))) for item in range(len(states))])
        return [engine.executor.memory.draft_values[:, state.pages[0]].clone() for state in states]

    names = adapted.draft_variants
    alone = {name: context([name], held=False)[0] for name in names}
    for held in (False, True):
        assert all(map(torch.equal, context(names, held), alone.values()))
    assert alone["base"].equal(alone["voice"])
    assert not any(alone["base"].equal(alone[name]) for name in ("keys", "taps"))


# ---- the prefix cache


def test_a_cached_prefix_serves_only_variants_with_the_same_context(adapted: LLM) -> None:
    ids = prompt(2 * PAGE_TOKENS + 10, 3)
    assert sharing(adapted, "base", ids) == 0
    assert sharing(adapted, "voice", ids) == 2 * PAGE_TOKENS, "it makes the context the base makes"
    assert sharing(adapted, "keys", ids) == 0
    assert sharing(adapted, "taps", ids) == 0
    assert all(sharing(adapted, name, ids) == 2 * PAGE_TOKENS for name in adapted.draft_variants), "side by side"
    plain = ask("plain", ids, mode="plain", max_tokens=2)
    assert run(adapted, [plain])["plain"][2].cached_tokens == 2 * PAGE_TOKENS
    assert_idle(adapted)


def test_drafts_behind_a_cached_prefix_are_the_variants_own(adapted: LLM) -> None:
    ids = prompt(2 * PAGE_TOKENS + 10, 4)
    sharing(adapted, "base", ids)
    for name in adapted.draft_variants:
        first = replace(ask(f"{name} 1", ids, max_tokens=12), draft_lora=name)
        fresh, first, second = replace(first, id="fresh", cache_prompt=False), first, replace(first, id=f"{name} 2")
        steps = [run(adapted, [request])[request.id][1] for request in (fresh, first, second)]
        assert seen(steps[0]) == seen(steps[1]) == seen(steps[2])


def test_a_removed_variant_leaves_no_page_behind(adapted: LLM, sources: dict[str, str]) -> None:
    ids = prompt(2 * PAGE_TOKENS + 10, 5)
    prefix = adapted.engine.prefix
    assert prefix is not None
    adapted.add_draft_lora(sources["keys"].replace("keys=", "twin="))
    for name in ("base", "keys"):
        sharing(adapted, name, ids)
    assert sharing(adapted, "twin", ids) == 2 * PAGE_TOKENS, "the same adapter by another name"
    adapted.remove_draft_lora("keys")
    assert len(prefix.held()) == 4, "its twin reads the pages still"
    adapted.remove_draft_lora("twin")
    adapted.remove_draft_lora("voice")
    assert len(prefix.held()) == 2 and sharing(adapted, "base", ids) == 2 * PAGE_TOKENS


# ---- names


def test_unknown_names_are_refused_with_the_known_ones(adapted: LLM) -> None:
    for mode in ("chain", "plain", "auto"):
        request = replace(ask("r", prompt(5), mode=mode), draft_lora="vioce")
        with pytest.raises(RequestError, match=r"'vioce' \(known: base, voice, keys, taps\)"):
            adapted.engine.add(request)
    assert not adapted.engine.has_work
    assert adapted.request([1], draft_lora="keys").draft_lora == "keys"


def test_without_a_drafter_there_are_no_variants(folder: Path, sources: dict[str, str]) -> None:
    llm = tiny_llm(folder, draft=False)
    assert llm.draft_variants == []
    run(llm, [ask("r", prompt(5), mode="plain", max_tokens=2)])
    with pytest.raises(RequestError, match="unknown draft variant 'keys'"):
        llm.engine.add(replace(ask("r", prompt(5), mode="plain"), draft_lora="keys"))
    with pytest.raises(RequestError, match="nothing to adapt"):
        llm.add_draft_lora(sources["keys"])


def test_a_taken_name_is_refused_and_base_stays(adapted: LLM, sources: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="'keys' already"):
        adapted.load_draft_lora(sources["keys"])
    twice = [adapted.load_draft_lora(sources["keys"].replace("keys=", "new=")) for _ in range(2)]
    assert adapted.install_draft_lora(twice[0]) == "new"
    with pytest.raises(RequestError, match="'new' already"):
        adapted.install_draft_lora(twice[1])
    for name, said in (("base", "cannot be removed"), ("never", "known: base")):
        with pytest.raises(RequestError, match=said):
            adapted.remove_draft_lora(name)
    assert adapted.draft_variants == ["base", "voice", "keys", "taps", "new"]


# ---- coming and going


def test_variants_come_and_go_while_others_run(llm: LLM, sources: dict[str, str]) -> None:
    requests = {name: replace(ask(name, prompt(80, 6), max_tokens=40), draft_lora=name) for name in ("base", "keys")}
    llm.add_draft_lora(sources["keys"])
    wanted = {name: run(llm, [request])[name] for name, request in requests.items()}
    for request in requests.values():
        llm.engine.add(request)
    steps: dict[str, list[StepRecord]] = {name: [] for name in requests}

    def go_on(turns: int) -> None:
        for _ in range(turns):
            for event in llm.engine.step():
                if event.step is not None and event.request_id in steps:
                    steps[event.request_id].append(event.step)

    go_on(5)
    loaded = []
    loader = threading.Thread(target=lambda: loaded.append(llm.load_draft_lora(sources["taps"])))
    loader.start()
    while loader.is_alive():
        go_on(1)
    loader.join()
    llm.install_draft_lora(loaded.pop())
    llm.engine.add(replace(ask("new", prompt(30, 7), max_tokens=6), draft_lora="taps"))
    with pytest.raises(RequestError, match=r"'taps' is in use \(open requests: 1\)"):
        llm.remove_draft_lora("taps")
    while "new" in llm.engine.sequences:
        go_on(1)
    llm.remove_draft_lora("taps")
    llm.engine.pause("keys")
    with pytest.raises(RequestError, match="'keys' is in use"):
        llm.remove_draft_lora("keys")
    assert llm.engine.resume("keys")
    while llm.engine.has_work:
        go_on(1)
    assert {name: seen(found) for name, found in steps.items()} == {n: seen(w[1]) for n, w in wanted.items()}
    llm.remove_draft_lora("keys")
    assert llm.draft_variants == ["base"]
    assert_idle(llm)


def test_a_new_variant_under_an_old_name_starts_afresh(llm: LLM, sources: dict[str, str]) -> None:
    llm.add_draft_lora(sources["keys"])
    request = replace(ask("r", prompt(20), mode="auto"), draft_lora="keys")

    def fresh_policy(name: str) -> SequencePolicy:
        llm.engine.add(replace(request, draft_lora=name))
        policy = llm.engine.scheduler.waiting[0].policy
        assert policy is not None
        llm.engine.cancel("r")
        llm.engine.step()
        return policy

    drafted = fresh_policy("keys")
    drafted.slots = 1
    drafted.learn(Proposal((1, 2), (-1, 0), (1.0, 0.5)), Verdict((0, 1), (2, 3)))
    assert fresh_policy("keys").by_slots.drafts
    assert not fresh_policy("base").by_slots.drafts, "what variants showed is kept apart"
    llm.remove_draft_lora("keys")
    llm.add_draft_lora(sources["taps"].replace("taps=", "keys="))
    assert not fresh_policy("keys").by_slots.drafts


# ---- memory


def matrices(drafter: DFlashDrafter) -> dict[str, Matrix]:
    found = {"fc": drafter.fc, "context_kv": drafter.context_kv}
    for index, layer in enumerate(drafter.layers):
        names = ("qkv", "output", "gate_up", "down")
        found |= {f"{index}.{name}": matrix for name, matrix in zip(names, layer.matrices, strict=True)}
    return found


@pytest.mark.parametrize("weight_format", FORMATS)
def test_what_an_adapter_leaves_alone_is_the_bases_own(
    folder: Path, sources: dict[str, str], weight_format: WeightFormat
) -> None:
    llm = tiny_llm(folder, weight_format=weight_format)
    own = {
        "voice": {f"{i}.{part}" for i in range(2) for part in ("qkv", "output", "gate_up", "down")},
        "keys": {"context_kv", "0.qkv", "1.qkv"},
        "taps": {"fc", "0.gate_up", "1.gate_up"},
    }
    base = matrices(drafter_of(llm, "base"))
    for name, source in sources.items():
        llm.add_draft_lora(source)
        found = matrices(drafter_of(llm, name))
        assert {part for part in found if found[part] is not base[part]} == own[name]
        assert drafter_of(llm, name).rotary is drafter_of(llm, "base").rotary


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_removed_variant_gives_its_memory_back(
    folder: Path, sources: dict[str, str], weight_format: WeightFormat
) -> None:
    llm = tiny_llm(folder, weight_format=weight_format)
    for source in sources.values():
        llm.add_draft_lora(source)
    run(llm, [replace(ask("r", prompt(20), max_tokens=4), draft_lora="keys")])
    context = drafter_of(llm, "keys").context_kv
    watched = [weakref.ref(drafter_of(llm, "keys")), weakref.ref(context)]
    if isinstance(context, NativeMatrix):
        # the whole stretch of memory that packed weights are laid out in
        watched.append(weakref.ref(context.data[0].base.obj))
    del context
    llm.remove_draft_lora("keys")
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    assert run(llm, [replace(ask("r", prompt(20), max_tokens=4), draft_lora="voice")])["r"][0]
