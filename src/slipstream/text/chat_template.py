"""Renders a model's chat template, which is Jinja code from an untrusted file.

Jinja's sandbox keeps a template from reaching the process around it. A child process with limits keeps it from
computing forever: a single product or power, computed in C, could otherwise hold the interpreter's lock for hours.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import ConfigError, RequestError
from slipstream.isolation import MIB, Helper, Limits, OverrunError

# Real templates take milliseconds even for long conversations. A prompt of 8 MiB is longer than any context, and twice
# the largest body that a server accepts by default; rendering a conversation of that length needs about 60 MiB.
_MOST_PROMPT_BYTES = 8 * MIB
_LIMITS = Limits(cpu_s=3, memory_bytes=256 * MIB, answer_bytes=_MOST_PROMPT_BYTES)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; in a prompt it only passes its contents through."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def render(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
    tools: Sequence[Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> str:
    """Returns the prompt text of a conversation; further keywords, such as `enable_thinking`, reach the template."""
    if not template:
        raise RequestError("the model has no chat template", "send a raw prompt instead of messages")
    variables = {
        "messages": [dict(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None if tools is None else list(tools),
        **kwargs,
    }
    try:
        text: str = helper()(template, variables)
    except OverrunError as error:
        raise RequestError(f"the chat template {error}", "send less, or use another template") from None
    return text


def helper() -> Helper:
    """Returns the process that renders templates. All models share it; it ends when nothing refers to it any more."""
    with _lock:
        found = _shared.get("helper")
        if found is None:
            found = Helper(f"{__name__}:renderer", _LIMITS, called="process that renders chat templates")
            _shared["helper"] = found
    return found


_lock = threading.Lock()
_shared: weakref.WeakValueDictionary[str, Helper] = weakref.WeakValueDictionary()


def renderer() -> Callable[[str, dict[str, Any]], str]:
    """Returns the function that the child process calls; it caches compiled templates."""
    return _rendered


def _rendered(template: str, variables: dict[str, Any]) -> str:
    try:
        return _compiled(template).render(variables)
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None
    except Exception as error:  # a template is code and can raise anything
        reason = str(error).strip().splitlines()
        detail = reason[0] if reason else type(error).__name__
        message = f"the chat template refuses these messages: {detail}"
        raise RequestError(message, "check their roles and order") from None


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
