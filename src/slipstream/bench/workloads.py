"""Reads prompt files: one JSON object per line, {"turns": ["user message", ...]}; five sets are included."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from slipstream.errors import SourceError

# The sets that were published elsewhere. Figures on them can be compared with those of other engines, so a comparison
# that names no set takes these.
PUBLIC = ("humaneval", "gsm8k", "mt-bench")
# Much of an answer to the editing set is in the conversation already; an answer to the prose set is new text.
BUILT_IN = (*PUBLIC, "editing", "prose")

Conversation = tuple[str, ...]


def read_prompts(source: str, limit: int = 0) -> list[Conversation]:
    """The first `limit` conversations of a built-in set or a .jsonl file; a limit of 0 reads all."""
    if source in BUILT_IN:
        text = (resources.files("slipstream") / "data" / "prompts" / f"{source}.jsonl").read_text(encoding="utf-8")
    else:
        text = _read_file(Path(source))
    found: list[Conversation] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_conversation(line, f"{source}, line {number}"))
        if limit and len(found) == limit:
            break
    if not found:
        raise SourceError(f"{source} holds no prompts", 'each line must be {"turns": ["user message", ...]}')
    return found


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = f"give a .jsonl file or one of {', '.join(BUILT_IN)}"
        raise SourceError(f"there is no prompt file {path}", hint) from None
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{path} is not UTF-8 text", "save it as UTF-8") from error


def _conversation(line: str, where: str) -> Conversation:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, KeyError, TypeError):
        turns = None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
        raise SourceError(f"{where} is not a prompt", 'each line must be {"turns": ["user message", ...]}')
    return tuple(turns)
