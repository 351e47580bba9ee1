"""The worst known body for every endpoint: what an attacker would send at the size limit, and what a user might send.

`table(size)` builds them for any limit. A refused body costs almost nothing, because the limits of JSON values apply
first; an accepted body costs whatever the endpoint does with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slipstream.server.apis.common_schemas import MAX_ITEMS
from slipstream.server.operations.bodies import MAX_JSON_STRUCTURE, MAX_JSON_VALUES

MODEL = "smollm2"
# Counts just within the limits of JSON values, so that all work after the count still has to be done.
VALUES, STRUCTURE = MAX_JSON_VALUES - 100, MAX_JSON_STRUCTURE - 100
PROMPTS, CONSTRAINTS = "prompts", "constraints"
_LETTERS = "the quick brown fox jumps over the lazy dog {[(,;:)]} "
# Texts that are hard to split or to tokenise; each is a piece that is repeated.
TEXTS = {
    "words": "many short words of a text ",
    "one word": "a",
    "digits": "7",
    "spaces": " ",
    "kanji": "日",
    "rules": "=",
    "accents": "e\u0301",
}

Build = Callable[[], bytes]


@dataclass(frozen=True, slots=True)
class Worst:
    """One body. `refused` is the status that it must get; None leaves it open, because a valid body may be too long."""

    method: str
    path: str
    name: str
    build: Build
    refused: int | None = 400
    bounded_by: str = "the door"  # what bounds its cost: reading the body, preparing prompts, or compiling constraints
    general: bool = False  # whether it is the same for every path, and refused before any endpoint sees it

    @property
    def body(self) -> bytes:
        """The body, built anew each time, because all of them together would be a gigabyte."""
        return self.build()

    @property
    def label(self) -> str:
        return f"{self.method} {self.path} {self.name}"


def fill(head: str, item: str, tail: str, size: int, separator: str = ",", most: int = 1 << 30) -> Build:
    """`head`, as many items as fit into `size` bytes (at most `most`; spaces fill the rest), and `tail`."""

    def build() -> bytes:
        each = len(item.encode()) + len(separator)
        count = min(most, max(1, (size - len(head.encode()) - len(tail.encode())) // each))
        body = (head + separator.join([item] * count) + tail).encode()
        return body if most == 1 << 30 else body.ljust(size)

    return build


def numbered(head: str, item: str, tail: str, size: int, most: int = 1 << 30) -> Build:
    """Like `fill`, but with a different number in place of `%d` in every item."""

    def build() -> bytes:
        count = min(most, (size - len(head) - len(tail)) // (len(item) + 6))
        return (head + ",".join(item % (1_000_000 + index) for index in range(count)) + tail).encode()

    return build


def padded(head: str, letter: str, tail: str, size: int) -> Build:
    """One letter repeated between `head` and `tail`."""
    return fill(head, letter, tail, size, "")


def text(head: str, tail: str, size: int) -> Build:
    """A long text as a JSON string between `head` and `tail`."""
    return lambda: (head + json.dumps(long_text(size - len(head) - len(tail) - 2)) + tail).encode()


def long_text(size: int) -> str:
    return (_LETTERS * (size // len(_LETTERS) + 1))[:size]


def table(size: int) -> list[Worst]:
    """The bodies for every endpoint, of `size` bytes or a little less."""
    found = [*_chat(size), *_completions(size), *_messages(size), *_responses(size), *_text(size), *_control(size)]
    for path in ("/health", "/props", "/slots", "/metrics", "/v1/models", f"/v1/models/{MODEL}", "/v1/draft-lora"):
        found.append(Worst("GET", path, "a body nothing reads", padded("", "{", "", size), None))
    return found


def _anywhere(path: str, size: int) -> Iterator[Worst]:
    """The bodies for any path that accepts JSON."""
    for name, build in _general(size):
        yield Worst("POST", path, name, build, general=True)


def _general(size: int) -> Iterator[tuple[str, Build]]:
    yield "empty objects", fill("[", "{}", "]", size)
    yield "nested empty lists", fill("[", "[[]]", "]", size)
    yield "objects of one key", fill("[", '{"":0}', "]", size)
    yield "objects within the limit", fill("[", '{"":0}', "]", size, most=STRUCTURE // 2)
    yield "lists within the limit", fill("[", "[[]]", "]", size, most=STRUCTURE // 2)
    yield "unknown fields", numbered("{", '"%d":0', "}", size)
    yield "unknown fields within the limit", numbered("{", '"%d":0', "}", size, STRUCTURE)
    yield "strings within the limit", numbered("[", '"%d"', "]", size, VALUES)
    yield "floats within the limit", numbered("[", "%d.5", "]", size, VALUES)
    yield "floats", fill("[", "1.5", "]", size)
    yield "short strings", fill("[", '"ab"', "]", size)
    yield "half surrogates", fill('{"model":"', r"\ud83d", '"}', size, "")
    yield "brackets", padded("", "[", "", size)
    yield "quotes", padded("", '"', "", size)
    yield "backslashes", padded('"', "\\", "", size)
    yield "a long unknown field", padded('{"', "k", '":0}', size)


def _chat(size: int) -> Iterator[Worst]:
    path = "/v1/chat/completions"
    head = f'{{"model":"{MODEL}","max_tokens":2,"messages":'

    def worst(name: str, build: Build, refused: int | None = 400, bounded_by: str = "the door") -> Worst:
        return Worst("POST", path, name, build, refused, bounded_by)

    user = '[{"role":"user","content":"a"}]'
    yield from _anywhere(path, size)
    yield worst("empty parts", fill(f'{head}[{{"role":"user","content":[', "{}", "]}]}", size))
    yield worst("wrong parts", fill(f'{head}[{{"role":"user","content":[', '{"type":"image"}', "]}]}", size))
    yield worst("empty tool calls", fill(f'{head}[{{"role":"assistant","tool_calls":[', "{}", "]}]}", size))
    yield worst(
        "empty parts within the limit", fill(f'{head}[{{"role":"user","content":[', "{}", "]}]}", size, most=STRUCTURE)
    )
    yield worst("wrong messages", fill(f"{head}[", '{"role":"x"}', "]}", size))
    yield worst("numbers as messages", fill(f"{head}[", "0", "]}", size))
    yield worst("empty stops", fill(f'{head}{user},"stop":[', '""', "]}", size))
    yield worst("wrong biases", numbered(f'{head}{user},"logit_bias":{{', '"x%d":0', "}}", size))
    yield worst("much metadata", numbered(f'{head}{user},"metadata":{{', '"%d":0', "}}", size))
    yield worst("empty tools", fill(f'{head}{user},"tools":[', "{}", "]}", size))
    yield worst("a long tag", padded(f'{head}[{{"role":"', "r", '","content":"a"}]}', size))
    yield worst("template settings", numbered(f'{head}{user},"chat_template_kwargs":{{', '"k%d":0', "}}", size), None)
    yield worst(
        "template settings within the limit",
        numbered(f'{head}{user},"chat_template_kwargs":{{', '"k%d":0', "}}", size, STRUCTURE),
        None,
    )
    yield worst(
        "a schema of enums within the limit",
        numbered(
            f'{head}{user},"response_format":{{"type":"json_schema","json_schema":{{"name":"a","schema":{{"enum":[',
            '"%d"',
            "]}}}}",
            size,
            VALUES,
        ),
        None,
        CONSTRAINTS,
    )
    yield worst(
        "a schema of enums",
        fill(
            f'{head}{user},"response_format":{{"type":"json_schema","json_schema":{{"name":"a","schema":{{"enum":[',
            '"ab"',
            "]}}}}",
            size,
        ),
        None,
    )
    yield worst(
        "tool parameters",
        numbered(
            f'{head}{user},"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"type":"object",'
            '"properties":{',
            '"p%d":{}',
            "}}}}]}",
            size,
        ),
        None,
    )
    yield worst(
        "tool parameters within the limit",
        numbered(
            f'{head}{user},"tools":[{{"type":"function","function":{{"name":"f","parameters":{{"type":"object",'
            '"properties":{',
            '"p%d":{}',
            "}}}}]}",
            size,
            STRUCTURE // 2,
        ),
        None,
        CONSTRAINTS,
    )
    yield worst("valid parts within the limit", _turns(head, '{"type":"text","text":"abc"}', size), None, PROMPTS)
    yield worst("a wrong part after valid ones", _turns(head, '{"type":"text","text":"abc"}', size, ",{}"))
    yield worst(
        "valid messages within the limit",
        fill(f"{head}[", '{"role":"user","content":"abc"}', "]}", size, most=MAX_ITEMS),
        None,
        PROMPTS,
    )
    yield worst(
        "arguments of a call",
        fill(
            f'{head}[{{"role":"assistant","tool_calls":[{{"id":"a","function":{{"name":"f","arguments":"[',
            "{}",
            ']"}}]}]}',
            size,
        ),
        None,
        PROMPTS,
    )
    yield worst(
        "many valid parts", fill(f'{head}[{{"role":"user","content":[', '{"type":"text","text":""}', "]}]}", size), None
    )
    yield worst("many valid messages", fill(f"{head}[", '{"role":"user","content":""}', "]}", size), None)
    yield worst("a long text", text(f'{head}[{{"role":"user","content":', "}]}", size), None, PROMPTS)
    yield worst(
        "escapes", fill(f'{head}[{{"role":"user","content":"', r"\ud83d\ude00", '"}]}', size, ""), None, PROMPTS
    )
    yield worst(
        "one wide letter", padded(f'{head}[{{"role":"user","content":"\U0001f600', "a", '"}]}', size), None, PROMPTS
    )


def _turns(head: str, part: str, size: int, last: str = "") -> Build:
    """Two messages with as many parts as a body may have."""

    def build() -> bytes:
        parts = ",".join([part] * min(MAX_ITEMS - 1, STRUCTURE // 6 - 10))
        turn = f'{{"role":"user","content":[{parts}%s]}}'
        return f"{head}[{turn % ''},{turn % last}]}}".encode().ljust(size)

    return build


def _completions(size: int) -> Iterator[Worst]:
    path = "/v1/completions"
    head = f'{{"model":"{MODEL}","max_tokens":2,"prompt":'

    def worst(name: str, build: Build, refused: int | None = 400, bounded_by: str = "the door") -> Worst:
        return Worst("POST", path, name, build, refused, bounded_by)

    yield from _anywhere(path, size)
    yield worst("negative tokens", fill(f"{head}[", "-1", "]}", size))
    yield worst("booleans as tokens", fill(f"{head}[", "true", "]}", size))
    yield worst("a wrong last token", fill(f"{head}[", "257", ',"a"]}', size))
    yield worst("empty prompts", fill(f"{head}[", '""', "]}", size))
    yield worst("empty lists of tokens", fill(f"{head}[", "[]", "]}", size))
    yield worst("lists of one token", fill(f"{head}[", "[0]", "]}", size))
    yield worst("a wrong last token within the limit", fill(f"{head}[", "257", ',"a"]}', size, most=VALUES))
    yield worst("tokens within the limit", fill(f"{head}[", "257", "]}", size, most=VALUES), None, PROMPTS)
    yield worst("tokens", fill(f"{head}[", "257", "]}", size))
    yield worst("a long text", text(head, "}", size), None, PROMPTS)
    for name, piece in TEXTS.items():
        yield worst(f"a text of {name}", padded(f'{head}"', piece, '"}', size), 400, PROMPTS)


def _messages(size: int) -> Iterator[Worst]:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        limit = '"max_tokens":2,' if path == "/v1/messages" else ""
        head = f'{{"model":"{MODEL}",{limit}"messages":'
        user = '[{"role":"user","content":"a"}]'
        yield from _anywhere(path, size)
        for name, build in (
            ("empty blocks", fill(f'{head}[{{"role":"user","content":[', "{}", "]}]}", size)),
            ("wrong messages", fill(f"{head}[", '{"role":"x"}', "]}", size)),
            ("empty system blocks", fill(f'{head}{user},"system":[', "{}", "]}", size)),
            ("empty tools", fill(f'{head}{user},"tools":[', "{}", "]}", size)),
        ):
            yield Worst("POST", path, name, build)
        for name, build in (
            (
                "tool input",
                numbered(
                    f'{head}[{{"role":"assistant","content":[{{"type":"tool_use","id":"a","name":"f","input":{{',
                    '"%d":0',
                    "}}]}]}",
                    size,
                ),
            ),
            (
                "tool input within the limit",
                numbered(
                    f'{head}[{{"role":"assistant","content":[{{"type":"tool_use","id":"a","name":"f","input":{{',
                    '"%d":0',
                    "}}]}]}",
                    size,
                    STRUCTURE - 100,
                ),
            ),
            ("valid blocks within the limit", _turns(head, '{"type":"text","text":"a"}', size)),
            (
                "valid messages within the limit",
                fill(f"{head}[", '{"role":"user","content":"a"}', "]}", size, most=MAX_ITEMS),
            ),
            (
                "many valid blocks",
                fill(f'{head}[{{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}", size),
            ),
            ("many valid messages", fill(f"{head}[", '{"role":"user","content":"a"}', "]}", size)),
            ("a long text", text(f'{head}[{{"role":"user","content":', "}]}", size)),
        ):
            yield Worst("POST", path, name, build, None, PROMPTS)


def _responses(size: int) -> Iterator[Worst]:
    path = "/v1/responses"
    head = f'{{"model":"{MODEL}","max_output_tokens":2,"input":'
    yield from _anywhere(path, size)
    for name, build in (
        ("empty items", fill(f"{head}[", "{}", "]}", size)),
        ("empty parts", fill(f'{head}[{{"role":"user","content":[', "{}", "]}]}", size)),
        ("empty reasoning", fill(f'{head}[{{"type":"reasoning","content":[', "{}", "]}]}", size)),
        ("wrong includes", fill(f'{head}"a","include":[', '""', "]}", size)),
        ("much metadata", numbered(f'{head}"a","metadata":{{', '"%d":0', "}}", size)),
    ):
        yield Worst("POST", path, name, build)
    yield Worst(
        "POST",
        path,
        "logprobs sent back",
        fill(f'{head}[{{"role":"user","content":[{{"type":"output_text","text":"a","logprobs":[', "{}", "]}]}]}", size),
    )
    yield Worst(
        "POST",
        path,
        "logprobs within the limit",
        fill(
            f'{head}[{{"role":"user","content":[{{"type":"output_text","text":"a","logprobs":[',
            "{}",
            "]}]}]}",
            size,
            most=MAX_ITEMS,
        ),
        None,
    )
    yield Worst(
        "POST",
        path,
        "valid items within the limit",
        fill(f"{head}[", '{"role":"user","content":"a"}', "]}", size, most=MAX_ITEMS),
        None,
        PROMPTS,
    )
    yield Worst("POST", path, "many valid items", fill(f"{head}[", '{"role":"user","content":"a"}', "]}", size), None)
    yield Worst("POST", path, "a long text", text(head, "}", size), None, PROMPTS)


def _text(size: int) -> Iterator[Worst]:
    yield from _anywhere("/tokenize", size)
    yield Worst("POST", "/tokenize", "a long text", text('{"content":', "}", size), None, PROMPTS)
    yield Worst("POST", "/tokenize", "a text of one word", padded('{"content":"', "a", '"}', size), 400, PROMPTS)
    yield Worst(
        "POST", "/tokenize", "a long text with pieces", text('{"with_pieces":true,"content":', "}", size), None, PROMPTS
    )
    yield from _anywhere("/detokenize", size)
    yield Worst("POST", "/detokenize", "wrong tokens", fill('{"tokens":[', '""', "]}", size))
    yield Worst("POST", "/detokenize", "a wrong last token", fill('{"tokens":[', "257", ",-1]}", size, most=VALUES))
    yield Worst("POST", "/detokenize", "tokens", fill('{"tokens":[', "257", "]}", size, most=VALUES), None, PROMPTS)


def _control(size: int) -> Iterator[Worst]:
    yield from _anywhere("/v1/draft-lora", size)
    yield Worst("POST", "/v1/draft-lora", "a long path", fill('{"path":"', "a/", '"}', size, ""))
    for path in ("/models/reload", f"/models/{MODEL}/load", "/models/nothing/unload"):
        yield Worst("POST", path, "a body nothing reads", fill("[", "{}", "]", size))
    yield Worst("DELETE", "/v1/draft-lora/nothing", "a body nothing reads", padded("", "{", "", size), 403)
