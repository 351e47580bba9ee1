"""Constraints, budgets and biases without a real model: what may be written where, and the same text in every mode."""

# mypy: disable-error-code="arg-type, assignment, call-overload, dict-item, unused-ignore, var-annotated"

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import jsonschema_rs
import numpy as np
import pytest
import torch

from slipstream.engine.llm import LLM, Completion
from slipstream.errors import RequestError
from slipstream.grammar import notations as grammars
from slipstream.grammar.constraints import Grammars
from slipstream.grammar.guide import Guide
from slipstream.server.serving.jobs import Tool
from slipstream.server.serving.jobs import ToolChoice as Choice
from slipstream.speculative.accept import NO_TOKEN
from slipstream.speculative.constrained_drafts import DraftRule
from slipstream.speculative.sampling import RowSampler
from slipstream.speculative.tree import Growth
from slipstream.types import Constraint, Proposal, SamplingParams, Thinking
from tests.tiny import EOS, VOCAB, assert_idle, tiny_llm

pytestmark = pytest.mark.usefixtures("threads")

COUNT = {"minItems": 1, "maxItems": 3}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "dög", 7, None]},
        "likes": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 40}, **COUNT},
    },
    "required": ["name", "kind", "likes"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"city": {"type": "string", "minLength": 1, "maxLength": 4}},
    },
)
CLOCK = Tool("clock")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory.mktemp("constrained"), weight_format="int8")


def compiled(llm: LLM, constraint: Constraint, thinking: Thinking | None = None) -> Guide:
    guide = llm.engine.grammars.guide(constraint, thinking)
    assert guide is not None
    return guide


def reads(llm: LLM, constraint: Constraint, text: str, thinking: Thinking | None = None) -> bool:
    """Whether a whole text, cut into single bytes by the tiny tokenizer, is allowed and may end there."""
    guide = compiled(llm, constraint, thinking)
    for token in llm.tokenizer.encode(text, add_bos=False):
        mask = guide.mask()
        if mask is not None and token not in mask:
            return False
        guide.observe(token)
    mask = guide.mask()
    return mask is None or EOS in mask


def in_every_mode(llm: LLM, prompt: str, modes: tuple[str, ...], **settings: object) -> dict[str, Completion]:
    answers = {mode: llm.generate(prompt, mode=mode, cache_prompt=False, **settings) for mode in ("plain", *modes)}
    plain = answers["plain"]
    for mode, answer in answers.items():
        assert answer.error is None
        assert (answer.token_ids, answer.finish_reason) == (plain.token_ids, plain.finish_reason), mode
    assert_idle(llm)
    return answers


MODES = ("chain", "tree:16:seed", "auto")


@pytest.mark.parametrize(
    ("schema", "temperature"),
    [(PERSON, 0.0), (PERSON, 0.8), (PERSON, 1.5), (TREE, 0.0), (TREE, 0.8)],
    ids=["flat-0", "flat-0.8", "flat-1.5", "recursive-0", "recursive-0.8"],
)
def test_a_schema_gives_the_same_valid_text_in_every_mode(
    pair: LLM, schema: dict[str, Any], temperature: float
) -> None:
    answers = in_every_mode(
        pair, "x", MODES, constraint=grammars.json_schema(schema), temperature=temperature, seed=3, max_tokens=120
    )
    plain = answers["plain"]
    if plain.finish_reason == "stop":
        assert jsonschema_rs.is_valid(schema, json.loads(plain.text)), plain.text
    else:
        assert schema is TREE, "only the recursive one may go on for ever"
    assert answers["chain"].stats.tau > 1.5, "what the grammar leaves no choice about is proposed"


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05, "repetition_penalty": 1.2}, {"logit_bias": {66: -100, 68: 5.5}}],
    ids=["top_p", "top_k", "min_p", "bias"],
)
def test_filters_penalties_and_bias_work_behind_the_mask(pair: LLM, settings: dict[str, Any]) -> None:
    constraint = grammars.regex("[A-E]{20,30}(yes|no)")
    answers = in_every_mode(
        pair, "y", MODES, constraint=constraint, temperature=0.9, seed=11, max_tokens=60, **settings
    )
    assert re.fullmatch("[A-E]{20,30}(yes|no)", answers["plain"].text)


def test_a_finished_grammar_ends_the_request_without_another_token(pair: LLM) -> None:
    answer = pair.generate("x", mode="chain", constraint=grammars.regex("AB?C"), temperature=0, seed=0)
    assert answer.finish_reason == "stop" and re.fullmatch("AB?C", answer.text)
    assert EOS not in answer.token_ids
    endless = pair.generate("x", constraint=grammars.regex("A*"), temperature=0, seed=0, max_tokens=9, mode="plain")
    assert set(endless.text) <= {"A"}


def test_a_batch_of_held_and_free_requests_leaves_the_free_ones_alone(pair: LLM) -> None:
    free = [{"temperature": 0.0}, {"temperature": 0.8}]
    held = [{"constraint": grammars.json_schema(PERSON)}, {"thinking": Thinking(3)}]
    common = {"mode": "auto", "seed": 5, "max_tokens": 60, "cache_prompt": False}
    requests = [pair.request(pair.prompt_ids("xyz"), **{**common, **own}) for own in (*free, *held)]
    alone = [pair.run([replace(request, id=f"alone-{index}")])[0] for index, request in enumerate(requests)]
    together = pair.run(requests)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert_idle(pair)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (grammars.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "[Uu]nsatisfiable"),
        (grammars.json_schema({"enum": []}), "[Uu]nsatisfiable"),
        (grammars.json_schema({"type": "banana"}), "banana"),
        (grammars.json_schema({"not": {"type": "string"}}), "not"),
        (grammars.json_schema({"$ref": "#/$defs/missing"}), "missing"),
        (grammars.lark("start: nobody"), "nobody"),
        (grammars.lark("start: <no_such_token>"), "no_such_token"),
        (grammars.regex("(unclosed"), "unclosed"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_one_sentence(pair: LLM, constraint: Constraint, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refusal:
        pair.request([1], constraint=constraint)
    assert "\n" not in str(refusal.value)


def test_a_schema_that_is_no_json_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    for schema in ({"enum": [{1, 2}]}, {"minimum": float("nan")}, deep):
        with pytest.raises(RequestError, match="not JSON"):
            grammars.json_schema(schema)
    while deep:
        deep = deep.pop("not")  # taken apart level by level, because freeing it at once would overflow the stack


def test_a_constraint_is_tried_once(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr("slipstream.grammar.constraints.REMEMBERED", 3)
    found = Grammars(pair.tokenizer, VOCAB)
    monkeypatch.setattr(pair.engine, "grammars", found)
    attempt = found.trial
    monkeypatch.setattr(found, "trial", lambda *asked: (tried.append(asked), attempt(*asked))[1])
    with ThreadPoolExecutor() as threads:  # a server tries it where it does not hold up the engine
        threads.submit(found.prepare, grammars.regex("one[0-9]"), None).result()
    found.prepare(grammars.regex("one[0-9]"), None)
    assert reads(pair, grammars.regex("one[0-9]"), "one7") and len(tried) == 1
    found.prepare(grammars.regex("one[0-9]"), Thinking(4))
    found.prepare(grammars.regex("one[0-9]"), Thinking(5))
    assert len(tried) == 2, "what is thought before is part of the grammar, how much is not"
    for index in range(3):
        found.prepare(grammars.regex(f"many{index}"), None)
    found.prepare(grammars.regex("one[0-9]"), None)
    assert len(tried) == 6, "old ones are forgotten"
    monkeypatch.undo()
    found.close()


def test_a_request_whose_every_token_is_banned_fails_alone(pair: LLM) -> None:
    bans = {ord_token(pair, letter): -100 for letter in "xy"}
    banned = {"constraint": grammars.regex("ABC[xy]Z"), "logit_bias": bans}
    for mode in ("plain", "chain", "auto"):
        common = {"mode": mode, "temperature": 0.7, "seed": 2, "max_tokens": 30, "cache_prompt": False}
        bad, good = pair.request([65], **common, **banned), pair.request([65], **common)
        alone = pair.run([replace(good, id="alone")])[0]
        failed, other = pair.run([bad, good])
        assert failed.finish_reason == "error" and failed.text == "ABC"
        assert failed.error is not None and "logit_bias" in failed.error
        assert (other.finish_reason, other.token_ids) == (alone.finish_reason, alone.token_ids)
    assert_idle(pair)


def ord_token(llm: LLM, letter: str) -> int:
    (token,) = llm.tokenizer.encode(letter, add_bos=False)
    return token


def test_a_matcher_that_breaks_ends_its_request_and_nobody_else(pair: LLM) -> None:
    constraint = grammars.lark('start: "AB" rest\nrest: /[A-D]{50}/')
    bad = pair.request([65], constraint=constraint, mode="chain", temperature=0, max_tokens=40)
    good = pair.request([65], mode="chain", temperature=0, seed=1, max_tokens=40)
    pair.engine.add(bad)
    pair.engine.add(good)
    guide = pair.engine.sequences[bad.id].sampler.guide
    assert guide is not None
    matcher = guide.matcher
    assert matcher is not None
    # An end of the text is forbidden there, so the matcher gives up for good; a new process is told all tokens anew.
    misled = Mock(side_effect=lambda written, path: matcher((*written[:-1], EOS), path))
    while not any(event.request_id == bad.id and event.tokens for event in pair.engine.step()):
        pass
    guide.matcher = misled
    pair.engine.grammars.close()
    ended = {}
    while pair.engine.has_work:
        ended |= {event.request_id: event for event in pair.engine.step() if event.finish_reason}
    assert ended[bad.id].finish_reason == "error" and "constraint" in (ended[bad.id].error or "")
    assert ended[good.id].finish_reason in ("length", "stop")
    assert_idle(pair)


def test_a_new_process_takes_up_where_the_last_one_ended(pair: LLM) -> None:
    constraint = grammars.json_schema(PERSON)
    alone = pair.generate("x", constraint=constraint, mode="plain", temperature=0, max_tokens=60)
    request = pair.request(pair.prompt_ids("x"), constraint=constraint, mode="chain", temperature=0, max_tokens=60)
    pair.engine.add(request)
    text = ""
    while pair.engine.has_work:
        text += "".join(event.text for event in pair.engine.step())
        if len(text) in range(5, 30):
            pair.engine.grammars.close()
    assert text == alone.text
    assert_idle(pair)


def test_masks_of_paths_that_only_look_alike_are_their_own(pair: LLM) -> None:
    """Two texts have as many tokens and the same last one; a matcher that is rolled back would confuse them."""
    constraint = grammars.json_schema(TREE)
    start = pair.tokenizer.encode('{ "v": false\n, "next": { "v"\n: ', add_bos=False)
    guide = compiled(pair, constraint)
    for token in start:
        guide.observe(token)
    for text in ("true,", "true}", "true\n", "true\n\t", "true,\n", "true}}", "true}\n"):
        path = tuple(pair.tokenizer.encode(text, add_bos=False))
        fresh = compiled(pair, constraint)
        for token in (*start, *path):
            fresh.observe(token)
        mask, expected = guide.mask(path), fresh.mask()
        assert mask is not None and expected is not None
        assert [token in mask for token in range(VOCAB)] == [token in expected for token in range(VOCAB)], text


def chain(path: Sequence[int]) -> Growth:
    growth = Growth([0])
    for row, token in enumerate(path):
        growth.add(row, token, 1.0, 1.0)
    return growth


def test_masks_behind_any_path_are_those_of_a_fresh_reading(pair: LLM) -> None:
    rng = random.Random(1)
    constraint = grammars.json_schema(PERSON)
    guide, written = compiled(pair, constraint), list[int]()
    while guide.mask() and guide.ready() and not guide.complete and len(written) < 60:
        for _ in range(4):
            path: tuple[int, ...] = ()
            for _ in range(rng.randrange(6)):
                mask = guide.mask(path)
                assert mask is not None
                if mask.end:
                    break
                path = (*path, int(rng.choice(np.flatnonzero(mask.allowed).tolist())))
            fresh = compiled(pair, constraint)
            for token in (*written, *path):
                fresh.observe(token)
            mine, theirs = guide.mask(path), fresh.mask()
            assert mine is not None and theirs is not None
            assert np.array_equal(mine.allowed, theirs.allowed) and mine.only == theirs.only
            assert DraftRule(guide, lambda slot, mask: None).fits(chain(path))
        mask = guide.mask()
        assert mask is not None
        token = int(rng.choice(np.flatnonzero(mask.allowed).tolist()))
        guide.observe(token)
        written.append(token)
    assert len(written) > 20


def test_choosing_leaves_no_trace_and_rows_get_the_mask_of_their_own_path(pair: LLM) -> None:
    """A tree has two branches: after A only B or C is allowed, after X only Y."""
    constraint = grammars.lark('start: "A" ("B" | "C") "D" | "X" "Y"')
    a, b, c, d, x, y = (ord_token(pair, letter) for letter in "ABCDXY")
    proposal = Proposal((65, a, x, c, y), (-1, 0, 0, 1, 2))
    logits = torch.zeros(5, VOCAB)
    for row, token in enumerate((x, c, d, d, d)):
        logits[row, token] = 9.0  # the target's choice without a mask; row 2 wants D where only Y is allowed
    guide = compiled(pair, constraint)
    sampler = RowSampler(SamplingParams(), VOCAB, [65], True, guide)
    for path in ((), (a,), (x,), (a, c), (x, y)):
        guide.mask(path)  # a step does not wait long for the masks of drafts, and on a busy machine they come late
    for _ in range(2):
        chosen = sampler.choose(logits, 1, proposal)
        assert (chosen[0], chosen[2]) == (x, y)
        assert not guide.complete
    logits[0, a] = 10.0
    chosen = sampler.choose(logits, 1, proposal)
    assert (chosen[0], chosen[1], chosen[3]) == (a, c, d)
    logits[1] = float("nan")
    assert sampler.choose(logits, 1, proposal)[1] == NO_TOKEN and sampler.failure is None
    assert b not in (chosen[0], chosen[1])


def test_forbidden_drafts_are_replaced_by_what_may_be_written(pair: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without masked drafts the same request accepts far fewer tokens."""
    settings = {"constraint": grammars.json_schema(PERSON), "mode": "chain", "temperature": 0, "max_tokens": 120}
    with_rule = pair.generate("x", **settings).stats
    monkeypatch.setattr(DraftRule, "fits", lambda self, *growths: True)
    assert with_rule.tau > 1.5 * pair.generate("x", **settings).stats.tau


def test_tool_calls_follow_their_form(pair: LLM) -> None:
    auto = grammars.tool_constraint([WEATHER, CLOCK], Choice())
    must = grammars.tool_constraint([WEATHER, CLOCK], Choice("required"))
    named = grammars.tool_constraint([WEATHER, CLOCK], Choice("auto", "weather"))
    once = grammars.tool_constraint([WEATHER, CLOCK], Choice(), parallel=False)
    assert auto and must and named and once
    rain = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    time = '<tool_call>\n{"name": "clock", "arguments": {"zone": [1, {"a": null}]}}\n</tool_call>'
    for text, wanted in {
        "just talk < tool": "auto once",
        "": "auto once",
        rain: "auto must named once",
        f"{rain}\n{time}": "auto must",
        f"so: {rain}": "auto once",
        f"so: {rain} and {time} done": "auto",
        time: "auto must once",
        "so <tool_call> no": "",
        rain.replace("Rom", "Byzantium"): "",
        rain.replace("weather", "waether"): "",
    }.items():
        allowed = {"auto": auto, "must": must, "named": named, "once": once}
        assert {name for name, c in allowed.items() if reads(pair, c, text)} == set(wanted.split()), text
    assert grammars.tool_constraint([], Choice("required")) is None
    assert grammars.tool_constraint([CLOCK], Choice("none")) is None


@pytest.mark.parametrize(
    ("tools", "choice", "reason"),
    [
        ([CLOCK], Choice("required", "weather"), "weather"),
        ([CLOCK, CLOCK], Choice(), "same name"),
        ([Tool("list", parameters={"type": "array"})], Choice(), "not an object"),
    ],
)
def test_tools_that_make_no_sense_are_refused(tools: list[Tool], choice: Choice, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        grammars.tool_constraint(tools, choice)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_calls_are_the_same_in_every_mode(pair: LLM, temperature: float) -> None:
    constraint = grammars.tool_constraint([WEATHER, CLOCK], Choice("required", "weather"))
    answers = in_every_mode(pair, "w", MODES, constraint=constraint, temperature=temperature, seed=8, max_tokens=200)
    call = answers["plain"].text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert jsonschema_rs.is_valid(WEATHER.parameters, json.loads(call)["arguments"])
    assert answers["chain"].stats.tau > 2


@pytest.mark.parametrize(("budget", "temperature"), [(0, 0.8), (1, 0.0), (7, 0.8)])
def test_a_budget_ends_reasoning_alike_in_every_mode(pair: LLM, budget: int, temperature: float) -> None:
    pieces = {token for token in range(VOCAB) if pair.tokenizer.token_bytes(token)[:1] > b"\x7f"}
    settings = {"temperature": temperature, "seed": 4, "max_tokens": 30, "ignore_eos": True}
    settings["logit_bias"] = dict.fromkeys(pieces, -100)  # half a character would postpone the end of the reasoning
    free = pair.generate("t", mode="plain", **settings)
    text = in_every_mode(pair, "t", MODES, thinking=Thinking(budget), **settings)["plain"].text
    assert text.startswith(pair.tokenizer.decode(free.token_ids[:budget]) + "</think>")
    assert text.count("</think>") == 1


def test_a_constraint_holds_from_the_end_of_reasoning_on(pair: LLM) -> None:
    constraint, thinking = grammars.json_schema(PERSON), Thinking(6)
    settings = {"temperature": 1.0, "seed": 6, "max_tokens": 150, "constraint": constraint, "thinking": thinking}
    text = in_every_mode(pair, "t", MODES, **settings)["plain"].text
    reasoning, _, answer = text.partition("</think>")
    assert reasoning and jsonschema_rs.is_valid(PERSON, json.loads(answer))


def test_where_reasoning_begins_and_ends(pair: LLM) -> None:
    constraint = grammars.regex("yes|no")
    opened, unopened = Thinking(), Thinking(opened=False)
    for text, wanted in {
        "hm</think>yes": (True, False),
        "</think>\n\nno": (True, False),
        "yes": (False, True),
        "<think>hm</think>\nno": (True, True),
        "hm</think>maybe": (False, False),
        "<think>hm": (False, False),
    }.items():
        assert (reads(pair, constraint, text, opened), reads(pair, constraint, text, unopened)) == wanted, text


def test_bias_moves_and_bans_tokens_in_drafts_too(pair: LLM) -> None:
    free = pair.generate("b", mode="plain", temperature=0, max_tokens=30, ignore_eos=True)
    loved = max(set(free.token_ids), key=free.token_ids.count)
    for temperature in (0.0, 0.9):
        settings = {"temperature": temperature, "seed": 1, "max_tokens": 30, "ignore_eos": True}
        banned = in_every_mode(pair, "b", MODES, logit_bias={loved: -100}, **settings)
        assert loved not in banned["plain"].token_ids
        pushed = in_every_mode(pair, "b", MODES, logit_bias={90: 100.0}, **settings)
        assert set(pushed["plain"].token_ids) == {90}
        assert pushed["chain"].stats.tau > 5, "a drafter that knows the bias guesses everything"


@pytest.mark.parametrize("bias", [{1: 101.0}, {1: float("nan")}, {VOCAB: 1.0}, {-1: 1.0}, {"x": 1.0}, {1: None}, 7])
def test_an_impossible_bias_is_refused(pair: LLM, bias: object) -> None:
    with pytest.raises(RequestError):
        pair.generate("x", logit_bias=bias, max_tokens=2)
    assert not pair.engine.has_work


def test_logprobs_stay_those_of_the_unmodified_target(pair: LLM) -> None:
    settings = {"temperature": 0, "max_tokens": 4, "logprobs": 3, "constraint": grammars.regex("ABBA!")}
    plain, chain = (pair.generate("q", mode=mode, **settings) for mode in ("plain", "chain"))
    assert plain.tokens[0].logprob is not None and plain.tokens[0].logprob < 0
    assert [t.top_logprobs for t in plain.tokens] == [t.top_logprobs for t in chain.tokens]
    assert any(token.id not in dict(token.top_logprobs) for token in plain.tokens), "forced tokens need not be likely"


def test_a_special_token_is_no_text(pair: LLM) -> None:
    """A string that spells a control token is written letter by letter and never contains the token itself."""
    constraint = grammars.json_schema({"enum": ["<|endoftext|>"]})
    answer = pair.generate("x", mode="chain", constraint=constraint, temperature=0)
    assert json.loads(answer.text) == "<|endoftext|>" and EOS not in answer.token_ids
