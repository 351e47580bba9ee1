"""Drafts from the text, with and without a drafter: the text stays plain decoding's, and such drafts are accepted."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.llm import LLM, Completion
from slipstream.errors import RequestError
from slipstream.grammar import notations as grammars
from slipstream.speculative import suffix_index
from slipstream.speculative.costs import CostTable
from slipstream.speculative.policy import Policy
from slipstream.types import Source
from tests.differential import Clock
from tests.fakes import FakeLLM
from tests.tiny import assert_idle, prompt, tiny_llm
from tests.unit.test_suffix_index import check

SOURCES: dict[str, bool | str] = {"the pair": True, "the text alone": "suffix"}
SENTENCE = "A sentence that comes again. "
VALUE = "the value that only the schema can know, which is rather long"


@pytest.fixture(autouse=True)
def steady_clock(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the policy see the same times on every machine, however busy it is."""
    monkeypatch.setattr(time, "perf_counter", Clock(random.Random(1)))


def open_llm(folder: Path, draft: bool | str, **settings: Any) -> LLM:
    """The tiny target in an exact format, on a machine where rows cost next to nothing, so that drafts are verified."""
    llm = tiny_llm(folder, draft=draft, weight_format="int8", **settings)
    slots = {1: 0.05, llm.proposals: 0.05} if llm.has_draft else {}
    llm.engine.proposer.policy = Policy(CostTable({1: 1.0, 64: 1.05}, slots))
    return llm


@pytest.fixture(params=SOURCES)
def speculating(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return open_llm(folder, SOURCES[request.param])


def both(llm: LLM, ids: Sequence[int], **settings: Any) -> tuple[Completion, Completion]:
    """The answer in mode auto, and the plain one, which shares nothing with it."""
    settings = {"max_tokens": 80, "ignore_eos": True, "seed": 5, **settings}
    auto = llm.run([llm.request(ids, mode="auto", **settings)])[0]
    plain = llm.run([llm.request(ids, mode="plain", **settings | {"cache_prompt": False})])[0]
    return auto, plain


def assert_same(auto: Completion, plain: Completion) -> None:
    assert (auto.token_ids, auto.text, auto.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert plain.stats.drafted == 0


def from_text(done: Completion) -> int:
    counts = done.stats.accepted_by_source
    assert sum(counts.values()) == done.stats.accepted
    return counts["text"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_plain_decodings(speculating: LLM, temperature: float) -> None:
    for seed in range(3):
        auto, plain = both(speculating, prompt(30, seed) * 3, temperature=temperature, seed=seed)
        assert_same(auto, plain)
        assert from_text(auto) > 0
    assert_idle(speculating)


def test_a_schema_is_kept(speculating: LLM) -> None:
    schema = grammars.json_schema({"type": "object", "properties": {"a": {"const": VALUE}}, "required": ["a"]})
    ids = speculating.prompt_ids(f'{{"a": "{VALUE}"}}\n{{"a": "{VALUE}"}}\n')
    auto, plain = both(speculating, ids, constraint=schema, max_tokens=120)
    assert_same(auto, plain)
    assert VALUE in auto.text and from_text(auto) > 0


def test_a_stop_string_ends_the_text_at_the_same_character(speculating: LLM) -> None:
    ids = prompt(30, 1) * 3
    _, whole = both(speculating, ids, temperature=0.8)
    stop = whole.text[50:58]
    auto, plain = both(speculating, ids, temperature=0.8, stop=(stop,))
    assert_same(auto, plain)
    assert auto.finish_reason == "stop" and stop not in auto.text and from_text(auto) > 0


@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": -1.0, "frequency_penalty": -0.2}, {"repetition_penalty": 0.9}]
)
def test_penalties_follow_every_path(speculating: LLM, penalties: dict[str, float]) -> None:
    auto, plain = both(speculating, prompt(30, 1) * 3, temperature=0.8, **penalties)
    assert_same(auto, plain)
    assert from_text(auto) > 0


def test_a_batch_writes_what_each_request_writes_alone(speculating: LLM) -> None:
    constraint = grammars.regex("[ab]{30,60}")
    asked: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        (prompt(20, 1) * 4, {"temperature": 0.0}),
        (prompt(9, 2) * 7, {"temperature": 0.8, "logprobs": 2}),
        (prompt(40, 3), {"temperature": 0.9, "frequency_penalty": -0.4}),
        (tuple(speculating.prompt_ids("abab" * 9)), {"constraint": constraint}),
    ]
    settings = {"max_tokens": 60, "ignore_eos": True, "seed": 3}
    alone = [
        speculating.run([speculating.request(ids, mode="plain", cache_prompt=False, **settings, **own)])[0]
        for ids, own in asked
    ]
    together = speculating.run([speculating.request(ids, mode="auto", **settings, **own) for ids, own in asked])
    for auto, plain in zip(together, alone, strict=True):
        assert_same(auto, plain)
    assert all(from_text(auto) > 0 for auto in together[:2]) and sum(map(from_text, together[2:])) > 0
    assert_idle(speculating)


def test_a_second_turn_finds_its_prefix_and_drafts_from_the_first(speculating: LLM) -> None:
    first, plain = both(speculating, prompt(50, 4) * 2, temperature=0.8)
    assert_same(first, plain)
    ids = (*prompt(50, 4) * 2, *first.token_ids, *prompt(6, 5))
    second, plain = both(speculating, ids, temperature=0.8)
    assert_same(second, plain)
    assert second.stats.cached_tokens > 0 and plain.stats.cached_tokens == 0 and from_text(second) > 0


def test_a_prompt_that_is_followed_in_pieces_changes_no_text(speculating: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_index, "MOST_FOLLOWED", 16)
    events = list(speculating.stream(SENTENCE * 6, mode="auto", max_tokens=200, ignore_eos=True))
    plain = speculating.generate(SENTENCE * 6, mode="plain", max_tokens=200, ignore_eos=True)
    assert [token.id for event in events for token in event.tokens] == plain.token_ids
    proposals = [event.step.proposal for event in events if event.step is not None]
    drafted = [any(source == Source.TEXT for source in proposal.sources[1:]) for proposal in proposals]
    pieces = len(speculating.prompt_ids(SENTENCE * 6)) // 16
    assert not any(drafted[: pieces - 1]) and any(drafted), "drafts begin once the whole prompt is known"


def test_pauses_and_lost_pages_leave_the_index_with_the_sequences_tokens(folder: Path) -> None:
    llm, rng = open_llm(folder, "suffix", cache_tokens=8 * 64, max_sequences=2), random.Random(3)
    settings = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 2}
    prompts = [prompt(30, seed) * 2 for seed in range(5)]
    plain = [llm.run([llm.request(ids, mode="plain", **settings)])[0].token_ids for ids in prompts]
    requests = [llm.request(ids, mode="auto", **settings) for ids in prompts]
    for request in requests:
        llm.engine.add(request)
    paused: set[str] = set()
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    checked, accepted, lost = 0, 0, 0
    while llm.engine.has_work:
        for sequence in list(llm.engine.scheduler.running):
            if rng.random() < 0.1 and llm.engine.pause(sequence.request.id):
                paused.add(sequence.request.id)
        for name in [name for name in sorted(paused) if not llm.engine.scheduler.running or rng.random() < 0.2]:
            lost += sum(each.phase == "paused-evicted" for each in llm.engine.scheduler.paused)
            paused.remove(name)
            llm.engine.resume(name)
        for event in llm.engine.step():
            texts[event.request_id] += [token.id for token in event.tokens]
            accepted += sum(event.stats.accepted_by_source.values()) if event.stats is not None else 0
        for sequence in llm.engine.scheduler.running:
            if sequence.index is not None and sequence.index.length:
                known = sequence.state.tokens[: sequence.index.length]
                check(sequence.index, known, 4, 4)
                checked += 1
    assert [texts[request.id] for request in requests] == plain
    assert checked > 20 and accepted > 0 and lost > 0


def test_a_target_without_a_drafter_speculates_from_its_text_unless_none_is_asked_for(folder: Path) -> None:
    alone, asked, none = (tiny_llm(folder, draft=word) for word in ("auto", "suffix", "none"))
    for llm in (alone, asked):
        assert (llm.draft_source, llm.speculates, llm.has_draft, llm.draft_label) == ("suffix", True, False, "suffix")
        assert llm.describe()["draft"] == "suffix" and llm.draft_variants == []
        assert str(llm.request([1]).mode) == "auto"
    assert (none.draft_source, none.speculates, none.draft_label) == (None, False, None)
    assert str(none.request([1]).mode) == "plain"
    done = none.generate("abc", max_tokens=8, ignore_eos=True)
    assert done.stats.drafted == 0 and done.stats.policy.choices == {"plain": 7}
    pair = tiny_llm(folder)
    assert (pair.draft_source, pair.draft_label) == ("drafter", "draft")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["tree:2:text", "tree:12:text"])
def test_a_tree_takes_nodes_from_the_text_if_it_is_asked_to(speculating: LLM, mode: str, temperature: float) -> None:
    ids, rows = prompt(30, 1) * 3, int(mode.split(":")[1])
    settings: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 40, "ignore_eos": True}
    tree, plain = (speculating.run([speculating.request(ids, mode=each, **settings)])[0] for each in (mode, "plain"))
    assert_same(tree, plain)
    assert tree.stats.drafted <= tree.stats.steps * (rows - 1)
    # Above temperature 0 the drafter's own candidates leave little to the text of these random words.
    assert from_text(tree) > 0 or (temperature and speculating.has_draft)
    if speculating.has_draft:
        without = speculating.run([speculating.request(ids, mode=f"tree:{rows}", **settings)])[0]
        assert without.token_ids == plain.token_ids and from_text(without) == 0


def test_a_tree_from_the_text_is_refused_where_the_text_is_no_source(folder: Path) -> None:
    with pytest.raises(RequestError, match="'tree:8:text' needs drafts from the text .*leave --no-text-drafts and"):
        tiny_llm(folder, text_drafts=False).generate("abc", mode="tree:8:text")


@pytest.mark.parametrize("mode", ["chain", "chain:4", "tree:8"])
def test_a_fixed_shape_needs_a_drafter_and_the_error_says_what_to_do(folder: Path, mode: str) -> None:
    with pytest.raises(RequestError, match=f"mode '{mode}' needs a drafter .*--draft, or use mode auto"):
        tiny_llm(folder, draft="suffix").generate("abc", mode=mode)
    with pytest.raises(RequestError, match=f"mode '{mode}' needs a drafter .*--draft, or use mode plain"):
        tiny_llm(folder, draft="none").generate("abc", mode=mode)


def test_a_gate_of_a_fixed_shape_is_refused_without_a_drafter(folder: Path) -> None:
    with pytest.raises(RequestError, match="mode 'chain' needs a drafter"):
        tiny_llm(folder, draft="suffix").generate("abc", gate="ema")


def test_mode_auto_has_nothing_to_draft_with_if_no_drafts_are_wanted(folder: Path) -> None:
    with pytest.raises(RequestError, match="mode 'auto' needs a drafter"):
        tiny_llm(folder, draft="none").generate("abc", mode="auto")


def test_adapters_need_a_drafter(folder: Path) -> None:
    with pytest.raises(RequestError, match="without a drafter there is nothing to adapt"):
        tiny_llm(folder, draft="suffix").add_draft_lora("a=somewhere")


def test_a_folder_called_suffix_is_given_as_a_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "suffix").symlink_to(folder / "draft")
    monkeypatch.chdir(folder)
    assert tiny_llm(folder, draft="./suffix").has_draft and not tiny_llm(folder, draft="suffix").has_draft


def test_the_command_line_asks_for_the_text_alone(cli: Any, fake_engine: type[FakeLLM]) -> None:
    done = cli("generate", "--prompt", "x", "--draft", "suffix", "--json")
    assert done.code == 0 and '"draft":"suffix"' in done.out.replace(" ", "")
    assert fake_engine.made[-1].draft == "suffix" and "mode" not in fake_engine.made[-1].requests[0]
    done = cli("bench", "--draft", "suffix", "--prompts", "gsm8k", "--limit", "1", "--json")
    assert done.code == 0 and '"draft":"suffix"' in done.out.replace(" ", "")
    done = cli("chat", "--draft", "suffix", "--mode", "chain", stdin="hello\n")
    assert done.code == 2 and "mode chain needs a drafter" in done.err
    done = cli("chat", "--draft", "suffix", "--json", stdin="hello\n")
    assert done.code == 0 and fake_engine.made[-1].requests[-1]["mode"] == "auto"
    done = cli("generate", "--prompt", "x", "--draft", "suffix", "--plain", "--json")
    assert done.code == 0 and '"draft":null' in done.out.replace(" ", "")
    done = cli("generate", "--prompt", "x", "--draft", "none", "--json")
    assert done.code == 0 and fake_engine.made[-1].draft is None
