"""Judges from a target's files whether it is the instruct model that a drafter was trained on, or the base model.

A base model of the same shape loads and runs with such a drafter. No error occurs, but it accepts fewer drafted tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from slipstream.errors import SlipstreamError
from slipstream.formats.file_bytes import read_json_object
from slipstream.formats.weight_files import open_weights, read_config
from slipstream.text.tokenizer import TURN_ENDS, Tokenizer

Says = Literal["instruct", "base", "nothing"]
_INSTRUCT = re.compile(r"(?<![a-z])(instruct|instruction|chat|it|sft|dpo|rlhf|thinking|assistant)(?![a-z])")
_BASE = re.compile(r"(?<![a-z])(base|pretrain|pretrained|pt)(?![a-z])")
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")  # they end documents, so they say nothing about turns
_NAME_KEYS = ("general.name", "general.basename", "general.finetune", "_name_or_path")
# The keys under which drafters of different authors name the model that they were trained on.
_TRAINED_ON = ("general.base_model.0.name", "base_model_name_or_path", "target_model", "target_model_name_or_path")


@dataclass(frozen=True, slots=True)
class Witness:
    """One piece of evidence: where it was found, what was seen, and what it says about the target."""

    name: str
    seen: str
    says: Says


@dataclass(frozen=True, slots=True)
class InstructReport:
    """What a target seems to be and what the drafter needs; `refused` is empty if they go together."""

    target: str
    verdict: Literal["instruct", "base"]
    wanted: Literal["instruct", "base"]
    refused: str
    witnesses: list[Witness]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def check_instruct(target: Path, drafter: Path | None = None) -> InstructReport:
    """Judges the target; a drafter counts as trained on the instruct model unless it names a base model."""
    metadata, config = _read(target)
    try:
        tokenizer: Tokenizer | None = Tokenizer.load(target, metadata)
    except SlipstreamError:
        tokenizer = None
    template = tokenizer.chat_template if tokenizer is not None else None
    seen = f"a chat template of {len(template)} characters" if template else "no chat template"
    values = metadata | config
    names = [target.name, *(str(values[key]) for key in _NAME_KEYS if values.get(key))]
    witnesses = [
        Witness("chat template", seen, "instruct" if template else "base"),
        _ending(template, tokenizer, _own_ends(target, metadata)),
        Witness("name", f"called {', '.join(dict.fromkeys(names))}", _says(names)),
    ]
    verdict: Literal["instruct", "base"] = "instruct" if _is_instruct(witnesses) else "base"
    trained = [] if drafter is None else [_trained_on(drafter)]
    wanted: Literal["instruct", "base"] = "base" if any(w.says == "base" for w in trained) else "instruct"
    refused = ""
    if verdict != wanted:
        reasons = "; ".join(w.seen for w in witnesses if w.says == verdict)
        refused = f"{target.name} is the {verdict} model, but the drafter was trained on the {wanted} one: {reasons}"
    return InstructReport(target.name, verdict, wanted, refused, [*witnesses, *trained])


def _is_instruct(witnesses: Sequence[Witness]) -> bool:
    """Without a chat template the model is a base model; with one, its end token counts more than its name."""
    template, ending, name = (witness.says for witness in witnesses)
    if template == "base" or name == "base":
        return False
    return ending != "base" or name == "instruct"


def _read(path: Path) -> tuple[dict[str, object], dict[str, object]]:
    with open_weights(path) as file:
        return dict(file.metadata), dict(read_config(path) or {})


def _ending(template: str | None, tokenizer: Tokenizer | None, ends: Sequence[int]) -> Witness:
    """Compares the end token with the one that closes the template's turns.

    An instruct model has the same token for both; some base models have a template but another end token.
    """
    name = "end token"
    if tokenizer is None or not ends:
        return Witness(name, "no end token is declared", "nothing")
    texts = [tokenizer.token_text(index) for index in ends]
    shown = ", ".join(repr(text) for text in texts)
    if not template:
        closing = any(text in TURN_ENDS and text not in _TEXT_ENDS for text in texts)
        return Witness(name, f"ends with {shown}", "instruct" if closing else "nothing")
    if any(text in template for text in texts if text) or "eos_token" in template:
        return Witness(name, f"ends with {shown}, as the template's turns do", "instruct")
    if any(text in template for text in TURN_ENDS):
        return Witness(name, f"ends with {shown}, which closes no turn of the template", "base")
    return Witness(name, f"ends with {shown}", "nothing")


def _own_ends(path: Path, metadata: Mapping[str, object]) -> list[int]:
    """The end tokens that the files themselves declare, without those that our tokenizer adds for safety."""
    found: list[object] = []
    if metadata:
        found = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    else:
        folder = path if path.is_dir() else path.parent
        for file in ("generation_config.json", "config.json"):
            if (folder / file).is_file():
                value = read_json_object(folder / file).get("eos_token_id")
                found += value if isinstance(value, list) else [value]
    return list(dict.fromkeys(index for index in found if type(index) is int))


def _says(names: Sequence[str]) -> Says:
    joined = " ".join(names).lower()
    tuned, plain = _INSTRUCT.search(joined), _BASE.search(joined)
    return "nothing" if bool(tuned) == bool(plain) else "instruct" if tuned else "base"


def _trained_on(drafter: Path) -> Witness:
    metadata, config = _read(drafter)
    values = metadata | config
    speculators = values.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, Mapping) else None
    names = [str(values[key]) for key in _TRAINED_ON if values.get(key)]
    if isinstance(verifier, Mapping) and verifier.get("name_or_path"):
        names.append(str(verifier["name_or_path"]))
    if not names:
        return Witness("drafter", f"{drafter.name} does not name its target, which counts as instruct", "nothing")
    return Witness("drafter", f"{drafter.name} was trained on {', '.join(names)}", _says(names))
