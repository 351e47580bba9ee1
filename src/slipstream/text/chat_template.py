"""Rendering a model's chat template, which is Jinja code from a file we do not trust, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import ConfigError, RequestError


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; when prompting it only passes them through."""

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
    """The prompt text of a conversation; further keywords reach the template, such as `enable_thinking`."""
    if not template:
        raise RequestError("the model has no chat template", "send a raw prompt instead of messages")
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            bos_token=bos_token,
            eos_token=eos_token,
            tools=None if tools is None else list(tools),
            **kwargs,
        )
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template has a syntax error in line {error.lineno}: {error.message}") from None
    except Exception as error:  # a template is code: anything can come out of it
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
    # Not Jinja's own filter: that one escapes characters that matter in HTML, and a prompt is not HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
