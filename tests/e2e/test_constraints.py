"""Grammars, tools, biases and budgets on the real pair: text is valid and equal in every mode, drafts are accepted."""

# mypy: disable-error-code="arg-type, call-overload, dict-item, unused-ignore"

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema_rs
import pytest

from slipstream.config import EngineConfig
from slipstream.engine.llm import LLM, Completion
from slipstream.grammar import guide, mask_lane
from slipstream.grammar import notations as grammars
from slipstream.server.serving.jobs import Tool
from slipstream.server.serving.jobs import ToolChoice as Choice
from slipstream.speculative.constrained_drafts import DraftRule
from slipstream.types import Thinking

pytestmark = pytest.mark.e2e
MODES = ("chain", "tree:16", "auto")
TEMPERATURES = (0.0, 0.8)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["röt", "green", "blue"]}, "minItems": 1, "maxItems": 2},
        "home": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "colours", "home"],
    "additionalProperties": False,
}


WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
TOOLS = [WEATHER, Tool("get_time")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("smollm2", config=EngineConfig(check_integrity=True))


def in_every_mode(
    llm: LLM, prompt: str, temperature: float, max_tokens: int, **settings: object
) -> dict[str, Completion]:
    common = {"chat": True, "temperature": temperature, "seed": 5, "max_tokens": max_tokens, "cache_prompt": False}
    answers = {mode: llm.generate(prompt, mode=mode, **common, **settings) for mode in ("plain", *MODES)}
    plain = answers["plain"]
    for mode, answer in answers.items():
        assert answer.error is None
        assert (answer.text, answer.token_ids) == (plain.text, plain.token_ids), f"{mode} at {temperature}"
        assert answer.finish_reason == plain.finish_reason
    return answers


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_schema(llm: LLM, temperature: float) -> None:
    constraint = grammars.json_schema(PERSON)
    answers = in_every_mode(llm, "Describe a man named Jürgen as JSON.", temperature, 120, constraint=constraint)
    plain = answers["plain"]
    assert plain.finish_reason == "stop" and jsonschema_rs.is_valid(PERSON, json.loads(plain.text)), plain.text
    assert answers["chain"].stats.tau > 2 and answers["tree:16"].stats.tau > 2


def test_any_object(llm: LLM) -> None:
    answers = in_every_mode(llm, "Write a JSON object with one key.", 0.0, 60, constraint=grammars.json_object())
    text = answers["plain"].text
    assert text.startswith("{")
    if answers["plain"].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_tool_that_must_be_called(llm: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drafts whose masks come late are dropped. A busy machine makes masks late, so here a step waits for all of them.
    monkeypatch.setattr(guide, "DRAFTS_WAIT_S", 60.0)
    monkeypatch.setattr(mask_lane, "STEP_PATIENCE_S", 60.0)
    constraint = grammars.tool_constraint(TOOLS, Choice("required"), parallel=False)
    answers = in_every_mode(llm, "How warm is it in Paris, in celsius?", temperature, 90, constraint=constraint)
    text = answers["plain"].text
    assert answers["plain"].finish_reason == "stop"
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert list(call) == ["name", "arguments"]
    tool = next(tool for tool in TOOLS if tool.name == call["name"])
    assert jsonschema_rs.is_valid(tool.parameters, call["arguments"])
    assert answers["chain"].stats.tau > 3.5, "tokens that the grammar forces were not drafted"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_tool_that_may_be_called_leaves_other_text_alone(llm: LLM, temperature: float) -> None:
    prompt, constraint = "Name a river.", grammars.tool_constraint(TOOLS, Choice())
    held = in_every_mode(llm, prompt, temperature, 24, constraint=constraint)
    common = {"chat": True, "temperature": temperature, "seed": 5, "max_tokens": 24, "cache_prompt": False}
    free = {mode: llm.generate(prompt, mode=mode, **common) for mode in ("plain", "chain")}
    assert held["plain"].text == free["plain"].text
    assert held["chain"].stats.tau == pytest.approx(free["chain"].stats.tau), "the constraint changed the drafts"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_bias(llm: LLM, temperature: float) -> None:
    banned = {token for word in (" the", " a", " sea", ",") for token in llm.tokenizer.encode(word, add_bos=False)}
    answers = in_every_mode(llm, "Write a line about the sea.", temperature, 40, logit_bias=dict.fromkeys(banned, -100))
    assert not banned & set(answers["plain"].token_ids)
    assert answers["chain"].stats.accepted > 0


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_reasoning_within_a_budget_then_a_schema(llm: LLM, temperature: float) -> None:
    answers = in_every_mode(
        llm,
        "Think, then describe a person as JSON.",
        temperature,
        120,
        thinking=Thinking(12),
        constraint=grammars.json_schema(PERSON),
    )
    plain = answers["plain"]
    reasoning, tag, answer = plain.text.partition("</think>")
    assert tag and 0 < len(llm.tokenizer.encode(reasoning, add_bos=False)) <= 12
    assert plain.finish_reason == "stop" and jsonschema_rs.is_valid(PERSON, json.loads(answer)), plain.text


def test_drafts_that_know_the_grammar_are_accepted_more(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = grammars.tool_constraint([WEATHER], Choice("required"), parallel=False)
    settings = {"chat": True, "temperature": 0, "max_tokens": 80, "mode": "chain", "constraint": constraint}
    known = llm.generate("How warm is it in Paris?", **settings).stats
    monkeypatch.setattr(DraftRule, "fits", lambda self, *growths: True)
    blind = llm.generate("How warm is it in Paris?", **settings).stats
    assert known.tau > 1.5 * blind.tau


def test_a_batch_of_held_and_free_requests_leaves_the_free_ones_alone(llm: LLM) -> None:
    free = [{"temperature": 0.0}, {"temperature": 0.8}]
    held = [{"constraint": grammars.json_schema(PERSON)}, {"thinking": Thinking(5), "temperature": 0.8}]
    common = {"mode": "auto", "seed": 5, "max_tokens": 40, "cache_prompt": False}
    ids = llm.prompt_ids("Describe a person.", chat=True)
    requests = [llm.request(ids, **{**common, **own}) for own in (*free, *held)]
    alone = [llm.run([replace(request, id=f"alone-{index}")])[0] for index, request in enumerate(requests)]
    assert [answer.token_ids for answer in llm.run(requests)] == [answer.token_ids for answer in alone]
