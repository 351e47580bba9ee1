"""Runs random constraints, made by seed, through the real compiler; a process that dies by a signal is a failure.

    python -m tests.hostile.fuzz_constraints --count 200000 --seed 0

Each constraint is compiled as a server would do it, and then masked along a few random tokens. Worker processes go
through batches. If a process dies, or meets an error that is not ours, the seed of its constraint is named. If one
hangs, it is counted with its seed and the batch goes on after it; any hang makes the command fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import RequestError
from slipstream.grammar.constraints import Grammars
from slipstream.grammar.guide import GuideError
from slipstream.types import Constraint, Thinking
from tests.hostile.chains import KINDS, chain

ROOT = Path(__file__).parents[2]
BATCH = 2_000
STEPS = 6
# Seconds after which a constraint counts as hanging, also on a busy machine: compiling may use 2 s of processor time,
# and a mask takes milliseconds.
HANG_S = 30
Json = dict[str, Any]
REASONS = ("levels", "lead from one", "processor time", "MiB", "stack")


class Bytes:
    """A vocabulary of single bytes, some words and two special tokens."""

    words = [b"the", b" a", b'"', b'{"', b'": ', b"],", b"true", b"00", b"abab", b"\xc3\xa9", b"<|end|>", b"<|x|>"]
    tokens = [bytes([byte]) for byte in range(256)] + words
    eos_ids = frozenset({len(tokens) - 2})
    bos_id = None

    def token_bytes(self, index: int) -> bytes:
        return self.tokens[index]

    def is_special(self, index: int) -> bool:
        return index >= len(self.tokens) - 2

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def serialized(self) -> None:
        """Returns None, which makes the grammar library cut texts greedily."""


class Chance(random.Random):
    """Random choices; wild ones include wrong and unsupported values, tame ones get past the first error."""

    wild = False

    def pick(self, usual: Sequence[Any], wild: Sequence[Any] = ()) -> Any:
        return self.choice([*usual, *wild] if self.wild else usual)


def random_constraint(seed: int) -> tuple[Constraint, Thinking | None]:
    """The constraint of a seed: mostly small, sometimes a long chain or a text with a few wrong characters."""
    chance = Chance(seed)
    chance.wild = chance.random() < 0.3
    thinking = Thinking(opened=chance.random() < 0.5) if chance.random() < 0.1 else None
    if chance.random() < 0.02:
        return chain(chance.choice(KINDS), chance.choice([3, 60, 400, 700, 1_500])), thinking
    kinds: list[Literal["json_schema", "lark", "regex"]] = ["json_schema", "json_schema", "lark", "lark", "regex"]
    kind = chance.choice(kinds)
    if kind == "json_schema":
        text = json.dumps(document(chance))
    else:
        text = lark(chance) if kind == "lark" else pattern(chance, chance.randrange(6))
    return Constraint(kind, spoilt(chance, text) if chance.wild and chance.random() < 0.3 else text), thinking


def spoilt(chance: Chance, text: str) -> str:
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text) + 1)
        wrong = chance.choice(["", "", '"', "(", "{", "\\", "/", "|", "\x00", "é", "\ud800", "%json", "9"])
        text = text[:at] + wrong + text[at + 1 :]
    return text


# ---- JSON schemas


def document(chance: Chance) -> Json:
    names = [f"d{index}" for index in range(chance.choice([0, 1, 3, 8]))]
    result = schema(chance, 3, names)
    if names:
        result[chance.pick(["$defs"], ["definitions"])] = {name: schema(chance, 2, names) for name in names}
    if chance.random() < 0.5:
        result["x-guidance"] = {"whitespace_pattern": chance.pick([" ?"], [pattern(chance, 1)]), "lenient": True}
    return result


def schema(chance: Chance, depth: int, names: Sequence[str]) -> Json:
    if names and chance.random() < 0.25:
        return {"$ref": reference(chance, names)}
    if depth == 0 or chance.random() < 0.3:
        return leaf(chance)

    def part() -> Json:
        return schema(chance, depth - 1, names)

    def joined() -> Json:
        parts = [part() for _ in range(chance.randrange(1, 4))]
        return {chance.choice(["anyOf", "allOf", "oneOf"]): parts, **chance.pick([{}], [leaf(chance)])}

    usual = [joined, lambda: array(chance, part), lambda: mapping(chance, part), lambda: mapping(chance, part)]
    wild = [lambda: {"not": part()}, lambda: {"if": part(), "then": part(), "else": part()}, lambda: {"anyOf": []}]
    made: Json = chance.pick(usual, wild)()
    return made


def reference(chance: Chance, names: Sequence[str]) -> str:
    wild = ["#/nowhere", "#/properties/a", "#/%24defs/d0", "other.json", "#/anyOf/0", "#/$defs", "d0", "#d0"]
    found: str = chance.pick([*(f"#/$defs/{name}" for name in names), "#"], wild)
    return found


def array(chance: Chance, part: Callable[[], Json]) -> Json:
    made: Json = {"type": "array", "items": part()}
    if chance.random() < 0.3:
        made["prefixItems"] = [part() for _ in range(chance.randrange(4))]
    return made | bounds(chance, "minItems", "maxItems")


def mapping(chance: Chance, part: Callable[[], Json]) -> Json:
    keys = [chance.choice(["a", "b", "ab", "é", '"', "\\", "x" * 50]) for _ in range(chance.randrange(4))]
    made: Json = {"type": "object", "properties": {key: part() for key in keys}}
    if chance.random() < 0.5:
        known = [*made["properties"], *chance.pick([[]], [["unknown"]])]
        made["required"] = chance.sample(known, chance.randrange(len(known) + 1))
    if chance.random() < 0.2:
        made["patternProperties"] = {chance.pick(["^a+$", "^x"], [pattern(chance, 1)]): part()}
    if chance.random() < 0.5:
        made["additionalProperties"] = chance.choice([True, False, part()])
    return made | (bounds(chance, "minProperties", "maxProperties") if chance.wild else {})


def leaf(chance: Chance) -> Json:
    number = {"type": chance.choice(["integer", "number"]), **bounds(chance, "minimum", "maximum")}
    formats = ["date-time", "date", "time", "email", "uuid", "uri", "ipv4", "ipv6", "hostname", "duration"]
    text = {"type": "string", **bounds(chance, "minLength", "maxLength")}
    kinds = ["string", "null", "boolean", "object", "array", ["string", "null"]]
    made: Json = chance.pick(
        [
            {},
            {"type": chance.choice(kinds)},
            number,
            text,
            {**text, "pattern": pattern(chance, 3)},
            {**number, "multipleOf": chance.pick([1, 0.1, 3, 7, 997], [0, -1, 1e-9, 1e300, 100_003])},
            {"type": "string", "format": chance.pick(formats, ["unknown"])},
            {"const": chance.pick([None, 1, "a", {"b": [1, {}]}, [[]]], [1e400, "\ud800", 10**400])},
            {"enum": [chance.choice([index, f"v{index}", None]) for index in range(chance.choice([1, 5, 300]))]},
        ],
        [{**number, **bounds(chance, "exclusiveMinimum", "exclusiveMaximum")}, {"enum": []}, {"type": "unknown"}],
    )
    return made


def bounds(chance: Chance, least: str, most: str) -> Json:
    low = chance.pick([0, 1, 2, 7], [-1, 2.5, 10**9, 10**30, "1"])
    high = chance.pick([7, 8, 100, 3_000, 100_000], [0, -1, 7.5, 10**9, 10**30, None])
    return {name: value for name, value in ((least, low), (most, high)) if chance.random() < 0.3}


# ---- patterns and grammars


def pattern(chance: Chance, depth: int) -> str:
    if depth == 0:
        wild = [r"\b", "^", "$", "(?=a)", "", "(", "[", r"\1", "(?i)"]
        return str(chance.pick(["a", "b", ".", r"\d", r"\w", "[a-z]", "[^x]", "é", r"\p{L}", r"\x41"], wild))
    parts = [pattern(chance, depth - 1) for _ in range(chance.randrange(1, 3))]
    around = ["({})", "({})*", "({})+?", "({}){{2,}}", "({}){{0,30}}", "({}){{70}}", "(?:{})?", "(?s:{})", "{}"]
    return str(chance.choice(around)).format(chance.choice(["", "|"]).join(parts))


def lark(chance: Chance) -> str:
    rules = [f"r{index}" for index in range(chance.choice([1, 2, 5, 12]))]
    terminals = [f"T{index}" for index in range(chance.choice([1, 2, 5, 12]))]
    lines = [f"start: {alternatives(chance, [*rules, *terminals], 2)}"]
    for name in rules:
        wild = ["[lazy]", '[suffix="x"]', "[max_tokens=3]", "[stop=/a/]", ".2"]
        attributes = chance.pick(["", "", "", "[capture]"], wild)
        lines.append(f"{name}{attributes}: {alternatives(chance, [*rules, *terminals], 2)}")
    for index, name in enumerate(terminals):
        later = terminals[index + 1 :]  # terminals must not refer to themselves
        lines.append(f"{name}: {alternatives(chance, terminals if chance.wild else later, 2, inside=True)}")
    extras = ["%import common.NO", "%ignore T0", '%llguidance {"no_forcing": true}', '%llguidance {"x": 1}', "%declare"]
    lines.append(chance.pick(["", "", "%ignore / +/", "%import common.INT"], extras))
    return "\n".join(lines) + "\n"


def alternatives(chance: Chance, names: Sequence[str], depth: int, inside: bool = False) -> str:
    rows = [
        " ".join(atom(chance, names, depth, inside) for _ in range(chance.randrange(1, 4)))
        for _ in range(chance.randrange(1, 4))
    ]
    between = chance.choice([" | ", " | ", " & "]) if inside else chance.pick([" | ", " | "], [" & ", ""])
    return str(between).join(rows)


def atom(chance: Chance, names: Sequence[str], depth: int, inside: bool) -> str:
    """One piece of a rule or of a terminal; a terminal may contain no rules and no schemas."""
    usual: list[Callable[[], str]] = [
        *([lambda: chance.choice(names)] * 3 if names else []),
        lambda: '"a"',
        lambda: '"bc"i',
        lambda: '"a".."z"',
        lambda: f"/{pattern(chance, 2)}/",
    ]
    if depth:
        usual.append(lambda: f"({alternatives(chance, names, depth - 1, inside)})")
    if not inside and chance.random() < 0.1:
        usual = [
            lambda: f"%json {json.dumps(document(chance))}",
            lambda: '%regex {"substring_words": "a b c a b"}',
            lambda: "<|x|>",
            lambda: "<[267]>",
        ]
    wild = [
        lambda: f"~({alternatives(chance, names, 0, inside)})",
        lambda: "%lark {\nstart: /a/\n}",
        lambda: '""',
        lambda: "<[9999999]>",
        lambda: "@answer",
        lambda: "@nothing",
        lambda: "//",
        lambda: "unknown",
    ]
    many = chance.pick(["", "", "", "", "*", "+", "?", "{2}", "{0,9}"], ["{3,}", "{1000}", "{9,3}", "{99999}"])
    return str(chance.pick(usual, wild if chance.random() < 0.3 else [])()) + many


# ---- running them


def try_one(grammars: Grammars, seed: int) -> str:
    """Compiles the constraint of a seed, follows a few tokens, and returns the outcome."""
    constraint, thinking = random_constraint(seed)
    chance = Chance(seed)
    try:
        guide = grammars.guide(constraint, thinking)
        assert guide is not None
        for _ in range(STEPS):
            mask = guide.mask()
            if mask is None or mask.end:
                break
            allowed = mask.allowed.nonzero()[0]
            guide.observe(int(allowed[chance.randrange(len(allowed))]))
    except RequestError as error:
        return next((word for word in REASONS if word in str(error)), "refused")
    except GuideError:
        return "ended"
    return "walked"


def batch(first: int, count: int, at: Path) -> None:
    """Works through the seeds of a batch; the file holds the current seed and the outcomes of those before it."""
    grammars = Grammars(Bytes(), len(Bytes.tokens))
    outcomes: Counter[str] = Counter()
    with at.open("w") as file:
        for seed in range(first, first + count + 1):
            os.pwrite(file.fileno(), f"{json.dumps({'seed': seed, 'outcomes': outcomes})}\n".encode(), 0)
            signal.alarm(HANG_S if seed < first + count else 0)  # the signal also ends a process in compiled code
            if seed < first + count:
                outcomes[try_one(grammars, seed)] += 1
    grammars.close()


def run_batch(first: int, count: int) -> Counter[str]:
    """Runs a batch in separate processes; raises if one ends other than with its outcomes or by a hang."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    outcomes: Counter[str] = Counter()
    end = first + count
    while first < end:
        with tempfile.TemporaryDirectory() as folder:
            at = Path(folder) / "at"
            command = [sys.executable, "-m", "tests.hostile.fuzz_constraints", "--batch", str(at)]
            done = subprocess.run(
                [*command, "--seed", str(first), "--count", str(end - first)],
                capture_output=True,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
                cwd=ROOT,
            )
            found = json.loads(at.read_text().splitlines()[0]) if at.exists() else {"seed": None, "outcomes": {}}
        if done.returncode not in (0, -signal.SIGALRM):
            raise AssertionError(f"seed {found['seed']}: ended with {done.returncode}: {done.stderr[-2000:]}")
        outcomes.update(found["outcomes"])
        if done.returncode:
            print(f"seed {found['seed']} hangs", file=sys.stderr, flush=True)
            outcomes["hung"] += 1
        first = found["seed"] + 1 if done.returncode else end
    return outcomes


def fuzz(count: int, seed: int = 0, workers: int = 2) -> Counter[str]:
    """Tries `count` constraints from a seed on, in several processes; returns the outcomes, or raises."""
    starts = range(seed, seed + count, BATCH)
    with ThreadPoolExecutor(workers) as pool:
        parts = [pool.submit(run_batch, start, min(BATCH, seed + count - start)) for start in starts]
        return sum((part.result() for part in parts), Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=Path, help="work here, and write the seed into this file")
    options = parser.parse_args()
    if options.batch is not None:
        batch(options.seed, options.count, options.batch)
        return
    began = time.monotonic()
    outcomes = fuzz(options.count, options.seed, options.workers)
    seconds = time.monotonic() - began
    print(f"{outcomes.total()} constraints in {seconds:.0f} s, no signal: {dict(outcomes.most_common())}")
    sys.exit(1 if outcomes["hung"] else 0)


if __name__ == "__main__":
    main()
