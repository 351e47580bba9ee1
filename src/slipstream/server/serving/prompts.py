"""What a job asks of the model: the tokens of its prompt, and the constraint that its answer must obey."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.engine.llm import LLM
from slipstream.errors import RequestError
from slipstream.grammar import notations as grammars
from slipstream.grammar.notations import CALL_CLOSE, CALL_OPEN
from slipstream.server.serving.jobs import Job, JsonObject, Tool, ToolChoice
from slipstream.server.serving.parsing import THINK_CLOSE, THINK_OPEN
from slipstream.text.chat_template import render
from slipstream.text.tokenizer import Tokenizer, TooLongError
from slipstream.types import Constraint

# The longest run of characters without the end of a word or line. Tokenising it takes up to 75 MB, less than 20 times
# the size of a body of 4 MiB; without a limit, one body could take many times as much.
MAX_PIECE_CHARS = 1 << 18
# JSON values in the arguments of all past calls together. A parsed value takes up to 25 times the memory of its text;
# beyond this number, arguments are shown to the model as they were written.
MAX_ARGUMENT_VALUES = 1 << 16
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "template"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, and what its template says about the reasoning in the answer."""

    ids: list[int]
    thinking: bool = False  # the answer may begin with reasoning
    opened: bool = False  # the prompt ends inside the reasoning already


def build_prompt(llm: LLM, job: Job) -> Prompt:
    """Renders a conversation through the model's template, or takes raw text or tokens as they are."""
    if (job.messages is None) == (job.prompt is None):
        raise RequestError("a job needs either messages or a prompt", "give one of them")
    template = llm.tokenizer.chat_template if job.messages is not None else None
    thinking = _thinks(template, job)
    most = llm.max_context - 1  # room for at least one token of the answer
    if job.messages is None:
        return Prompt(_raw_ids(llm, job.prompt or (), most))
    shown = [message["content"].strip() for message in job.messages if _is_shown(message)]
    if llm.tokenizer.fewest_tokens(shown, most) > most:
        raise _too_long(llm, f"more than {most}")
    text = render_messages(template, job, llm.tokenizer.bos_token, llm.tokenizer.eos_token)
    end = text.rstrip()
    try:
        ids = llm.tokenizer.encode(text, add_bos=False, limit=most)
    except TooLongError:
        raise _too_long(llm, f"more than {most}") from None
    return Prompt(
        ids=ids,
        # A prompt may already hold the whole reasoning: an empty one, or one in the given beginning of the answer.
        thinking=thinking and not job.continues and not end.endswith(THINK_CLOSE),
        opened=thinking and not job.continues and end.endswith(THINK_OPEN),
    )


def _thinks(template: str | None, job: Job) -> bool:
    thinking = template is not None and THINK_CLOSE in template
    if job.thinking_budget is not None and not thinking:
        raise RequestError("a thinking budget was given, and this model does not think", "leave it out")
    return thinking


def _raw_ids(llm: LLM, prompt: str | Sequence[int], most: int) -> list[int]:
    if not isinstance(prompt, str):
        if len(prompt) > most:
            raise _too_long(llm, str(len(prompt)))
        return list(prompt)
    try:
        return llm.prompt_ids(prompt, limit=most)
    except TooLongError:
        raise _too_long(llm, f"more than {most}") from None


def _too_long(llm: LLM, tokens: str) -> RequestError:
    return RequestError(f"the prompt has {tokens} tokens, the context holds {llm.max_context}", "shorten the prompt")


def _is_shown(message: JsonObject) -> bool:
    """Whether every template shows this message in full, except for spaces around it.

    Only messages of the user count, because a template may leave out others in part, such as old reasoning.
    """
    return message.get("role") == "user" and isinstance(message.get("content"), str)


def count_tokens(llm: LLM, job: Job) -> int:
    """How many tokens the prompt of a conversation has, even if the context cannot hold them."""
    tokenizer = llm.tokenizer
    _thinks(tokenizer.chat_template, job)
    text = render_messages(tokenizer.chat_template, job, tokenizer.bos_token, tokenizer.eos_token)
    check_pieces(tokenizer, text)
    return sum(map(len, tokenizer.encode_pieces(text, add_bos=False)))


def check_pieces(tokenizer: Tokenizer, text: str) -> None:
    """Refuses a text that would take too much memory to tokenise; it is for texts that may be longer than a context."""
    longest = tokenizer.longest_piece(text)
    if longest > MAX_PIECE_CHARS:
        raise RequestError(
            f"the text has {longest} characters in which no word or line ends, and {MAX_PIECE_CHARS} are the most",
            "send it in parts",
        )


def render_messages(template: str | None, job: Job, bos_token: str = "", eos_token: str = "") -> str:
    """The conversation as one text; if the template knows no tools, a system message describes them."""
    kwargs = _template_kwargs(template or "", job.template_kwargs)
    tools = [] if job.tool_choice.kind == "none" else [_described(tool) for tool in job.tools]
    readable = _argument_values(job.messages or ()) <= MAX_ARGUMENT_VALUES
    messages = [_plain_message(message, readable) for message in job.messages or ()]
    begun = messages.pop()["content"] if job.continues and messages else ""
    native = knows_tools(template)
    if not native:
        messages = _with_tools_told(_tools_as_text(messages), tools)
    rendered = render(
        template,
        messages,
        tools=tools if native and tools else None,
        bos_token=bos_token,
        eos_token=eos_token,
        **kwargs,
    )
    return rendered + begun


def _template_kwargs(template: str, given: Mapping[str, object]) -> dict[str, Any]:
    """Variables for the template; one that the template does not use is refused, because it would have no effect."""
    kwargs: dict[str, Any] = dict(given)
    if "enable_thinking" not in template and kwargs.get("enable_thinking") is (THINK_OPEN in template):
        del kwargs["enable_thinking"]  # it asks for what this model, which always or never thinks, does anyway
    for name in kwargs:
        if name in _RESERVED:
            raise RequestError(f"chat_template_kwargs may not set '{name}'", "the server sets it itself")
        if name not in template:
            raise RequestError(f"this model's chat template does not know '{name}'", "leave it out")
    return kwargs


def knows_tools(template: str | None) -> bool:
    """Whether a template describes tools with the call tags that this server parses, and can show past calls."""
    return template is not None and all(word in template for word in ("tools", "tool_calls", CALL_OPEN))


def _described(tool: Tool) -> dict[str, Any]:
    parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _argument_values(messages: Sequence[JsonObject]) -> int:
    """About how many values the arguments of all calls have; only arguments that arrived as JSON text count."""
    functions = (call.get("function", call) for message in messages for call in message.get("tool_calls") or ())
    texts = (function.get("arguments") for function in functions)
    return sum(text.count(",") + text.count("{") + text.count("[") for text in texts if isinstance(text, str))


def _plain_message(message: JsonObject, readable: bool) -> dict[str, Any]:
    """A message as templates expect it: text content, role system for developer, parsed arguments if `readable`."""
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if message.get("role") == "developer" else message.get("role")
    plain["content"] = message.get("content") or ""
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, readable) for call in calls]
    return plain


def _plain_call(call: JsonObject, readable: bool) -> dict[str, Any]:
    function: Mapping[str, Any] = call.get("function", call)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str) and readable:
        # Arguments that are not JSON, or too deep, are shown to the model as they were written.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
            json.dumps(arguments)
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"type": "function", "id": call.get("id", ""), "function": named}


def _tools_as_text(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Past calls and their results as text, as the model would have written and read them."""
    told: list[dict[str, Any]] = []
    for is_result, group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            told += map(_calls_as_text, group)
    return told


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    parts = [*filter(None, [message["content"]]), *map(_call_as_text, message["tool_calls"])]
    return {"role": message["role"], "content": "\n".join(parts)}


def _call_as_text(call: JsonObject) -> str:
    text = io.StringIO()
    json.dump(call["function"], text, ensure_ascii=False)  # for many arguments, `dumps` would take twice the memory
    return f"{CALL_OPEN}\n{text.getvalue()}\n{CALL_CLOSE}"


def _with_tools_told(messages: list[dict[str, Any]], tools: Sequence[JsonObject]) -> list[dict[str, Any]]:
    if not tools:
        return messages
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told = (
        "You may call functions to help with the user's request. These are the functions, as JSON schemas:\n"
        f"<tools>\n{listed}\n</tools>\n"
        "To call one, write its name and its arguments as a JSON object inside these tags:\n"
        f'{CALL_OPEN}\n{{"name": "the function\'s name", "arguments": {{"its": "arguments"}}}}\n{CALL_CLOSE}'
    )
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def constraint_of(job: Job) -> Constraint | None:
    """The constraint of a job's answer; a format does not apply if the answer must be a call."""
    calls = grammars.tool_constraint(job.tools, job.tool_choice, parallel=job.parallel_tools)
    must_call = calls is not None and (job.tool_choice.kind == "required" or job.tool_choice.name is not None)
    if job.format is None or must_call:
        return calls
    return job.format if calls is None else _calls_or(job, job.format)


def _calls_or(job: Job, answer: Constraint) -> Constraint:
    """Either only calls or an answer in its format; a format leaves no room for free text before calls."""
    if answer.kind != "json_schema":
        raise RequestError("a grammar for the answer cannot be combined with tools", "leave one of them out")
    compelled = grammars.tool_constraint(job.tools, ToolChoice("required"), parallel=job.parallel_tools)
    assert compelled is not None and compelled.grammar.startswith("start: "), "calls have a rule to begin with"
    rules = compelled.grammar.replace("start: ", "start: calls | answer\ncalls: ", 1)
    return Constraint("lark", f"{rules}answer: %json {answer.grammar}\n")
