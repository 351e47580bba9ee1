"""Words that make things into people, counted in docstrings, comments and documents against a budget (docs/style.md).

`python -m tests.unit.test_words` prints every offending line and the counts in the form of BUDGET.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
# Offending words that each part may still hold. A part that is not listed may hold none. Lower a number whenever
# sentences of its part were reworded; raising one means that new prose breaks the style.
BUDGET: dict[str, int] = {"docs": 14}
WORDS = re.compile(r"\b(?:who|whom|whoever|nobody|somebody|everybody|anybody|theirs)\b", re.IGNORECASE)
# Phrases in which a real person is meant; they are taken out of a sentence before its words are looked at.
PEOPLE = (
    "a client who", "clients who", "people who", "a person who", "the person who", "a user who", "users who",
    "a reader who", "readers who", "an engineer who", "engineers who",
)  # fmt: skip
_PEOPLE = re.compile("|".join(r"\b" + phrase.replace(" ", r"[\s#/*]+") + r"\b" for phrase in PEOPLE), re.IGNORECASE)
# Quoted text is an example or a name in code. A quotation has at most three lines, so that a stray mark hides little.
_QUOTED = re.compile(r"```.*?```|`[^`\n]*(?:\n[^`\n]*){0,2}`|\"[^\"\n]*(?:\n[^\"\n]*){0,2}\"", re.DOTALL)
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_FOLDERS = ("src", "tests", "scripts", "examples")
_READERS = ("*.py", "*.cpp", "*.h")


class Offence(NamedTuple):
    """One word in one line of a file."""

    path: str
    line: int
    word: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.word}' in: {self.text}"


def _blank(match: re.Match[str]) -> str:
    """Spaces in place of a match; its line ends stay, so that the lines after it keep their numbers."""
    return re.sub(r"[^\n]", " ", match[0])


def python_prose(source: str) -> str:
    """The docstrings and comments of a module, each on the line where it stands, and nothing else."""
    lines = [""] * (source.count("\n") + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node):
                for number, line in enumerate(str(first.value.value).split("\n"), first.lineno - 1):
                    lines[number] = line
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += token.string
    return "\n".join(lines)


def cpp_prose(source: str) -> str:
    """The comments of a C++ file, each on the line where it stands, and nothing else."""
    kept, end = [], 0
    for match in _CPP_COMMENT.finditer(source):
        kept += [re.sub(r"[^\n]", " ", source[end : match.start()]), match[0]]
        end = match.end()
    return "".join(kept)


def offences(path: str, prose: str) -> list[Offence]:
    """Every offending word of a text that is not quoted and does not stand in a phrase about people."""
    text = _PEOPLE.sub(_blank, _QUOTED.sub(_blank, prose))
    shown = prose.split("\n")
    return [
        Offence(path, number, word, shown[number - 1].strip())
        for number, line in enumerate(text.split("\n"), 1)
        for word in WORDS.findall(line)
    ]


def part_of(path: str) -> str:
    """The package of a source file, and the top folder of any other file; README and its neighbours are documents."""
    pieces = path.split("/")
    if pieces[0] == "src":
        return f"src/{pieces[2]}" if len(pieces) > 3 else "src"
    return pieces[0] if len(pieces) > 1 else "docs"


@cache
def found() -> dict[str, list[Offence]]:
    """All offences of the repository by part."""
    texts = {path: path.read_text(encoding="utf-8") for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    for folder in _FOLDERS:
        for path in (each for pattern in _READERS for each in (ROOT / folder).rglob(pattern)):
            source = path.read_text(encoding="utf-8")
            read = python_prose if path.suffix == ".py" else cpp_prose
            texts[path] = read(source) if WORDS.search(source) else ""
    parts: dict[str, list[Offence]] = {}
    for path, prose in sorted(texts.items()):
        name = path.relative_to(ROOT).as_posix()
        parts.setdefault(part_of(name), []).extend(offences(name, prose))
    return parts


def test_things_are_not_people() -> None:
    over = {part: here for part, here in found().items() if len(here) > BUDGET.get(part, 0)}
    told = [
        "\n".join([f"{part}: {len(here)} such words, {BUDGET.get(part, 0)} may stay", *map(str, here)])
        for part, here in over.items()
    ]
    assert not over, "\n\n".join(
        ["words that make things into people; docs/style.md says how to reword these lines", *told]
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"""Whoever waits."""\n', ["Whoever"]),
        ("x = 1  # nobody reads it\n", ["nobody"]),
        ("def f():\n    '''It says\n\n    who runs.\n    '''\n", ["who"]),
        ("# a client\n# who waits\n", []),
        ("# a page who waits\n", ["who"]),
        ('# the word `who`, and another: "nobody\'s"\n', []),
        ("theirs = 'nobody'\nwho = theirs\n", []),
    ],
)
def test_the_rule_sees_prose_and_only_prose(source: str, words: list[str]) -> None:
    assert [offence.word for offence in offences("x.py", python_prose(source))] == words


def test_the_rule_reads_cpp_and_names_the_line() -> None:
    source = "int who = 1;\n/* one\n somebody */ int nobody; // theirs\n"
    assert [(offence.line, offence.word) for offence in offences("x.cpp", cpp_prose(source))] == [
        (3, "somebody"), (3, "theirs"),
    ]  # fmt: skip


if __name__ == "__main__":
    for each in (offence for here in found().values() for offence in here):
        print(each)
    counts = [f'    "{part}": {len(here)},' for part, here in sorted(found().items()) if here]
    print("\n".join(["BUDGET: dict[str, int] = {", *counts, "}"]))
