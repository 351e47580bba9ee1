"""Checks that a model file is complete and sane: its data, the tensors that its configuration implies, its values.

Every check says what it looked at and lists everything that it found, so that one run names all that must be repaired.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slipstream.errors import SlipstreamError
from slipstream.formats.weight_files import WeightTensor, read_config
from slipstream.models.decoder import DecoderConfig
from slipstream.models.dflash_config import DFlashConfig
from slipstream.text.tokenizer import Tokenizer
from slipstream.tools.file_report import inspect_file
from slipstream.tools.model_file import ModelFile, open_model
from slipstream.types import Progress, tracked

# Rows of each tensor that are checked, evenly spread, with the first and the last. More rows take longer; fewer miss
# damage that covers only a part of a tensor.
SAMPLED_ROWS = 32
SAMPLED_ELEMENTS = 2**18  # Values of each tensor that are checked at most, if its rows are long.
MAX_LISTED = 8  # Problems of one kind that are named; the rest is counted.
# Limits of what is plausible. A value outside of them is reported, because it usually means a damaged file.
_MOST_BLOCK_TOKENS = 256
_LEAST_THETA, _MOST_THETA = 1e2, 1e9
_MOST_EPS = 1e-2


@dataclass(slots=True)
class Check:
    """One check of a file: what it looked at, and the problems that it found."""

    name: str
    seen: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "passed": self.passed, "seen": self.seen, "problems": self.problems}


def check_file(path: Path, progress: Progress | None = None) -> list[Check]:
    """Runs every check that is possible; a file that is not complete is not checked any further."""
    whole = _complete(path)
    if whole.problems:
        return [whole]
    with ExitStack() as opened:
        try:
            model = opened.enter_context(open_model(path))
        except SlipstreamError as error:
            whole.problems.append(str(error))
            return [whole]
        return [whole, _metadata(model), _known(model), _finite(model, progress)]


def _complete(path: Path) -> Check:
    check = Check("data")
    try:
        report = inspect_file(path)
    except SlipstreamError as error:
        check.problems.append(str(error))
        return check
    tensors = report["tensors"]
    check.seen = f"{len(tensors) if isinstance(tensors, list) else 0} tensors in {report['size']} bytes"
    if report["problem"]:
        check.problems.append(str(report["problem"]))
    return check


def _metadata(model: ModelFile) -> Check:
    check = Check("metadata", f"the configuration of a {model.kind}")
    if model.config is None:
        check.problems.append(model.problem)
        return check
    check.problems += _shape_problems(model.config)
    if isinstance(model.config, DFlashConfig):
        check.problems += _drafter_problems(model.config)
        taps = ", ".join(map(str, model.config.target_layer_ids))
        check.seen += f": block of {model.config.block_size}, taps {taps}, mask {model.config.mask_token_id}"
    else:
        check.problems += _vocabulary_problems(model, model.config)
        check.seen += f": {model.config.family}, {model.config.layers} layers, context {model.config.max_positions}"
    return check


def _shape_problems(config: DecoderConfig | DFlashConfig) -> Iterator[str]:
    theta, eps = config.rope.theta, config.rms_eps
    if not (math.isfinite(theta) and _LEAST_THETA <= theta <= _MOST_THETA):
        yield f"rope theta is {theta:g}, but only {_LEAST_THETA:g} to {_MOST_THETA:g} are plausible"
    if not (math.isfinite(eps) and 0 < eps <= _MOST_EPS):
        yield f"the epsilon of the norms is {eps:g}, but only values above 0 and up to {_MOST_EPS:g} are plausible"
    if config.head_dim % 2:
        yield f"heads are {config.head_dim} wide, but rotary embeddings need an even number"


def _drafter_problems(config: DFlashConfig) -> Iterator[str]:
    taps = config.target_layer_ids
    if list(taps) != sorted(set(taps)):
        yield f"target_layer_ids {list(taps)} are not ascending"
    if config.num_target_layers is not None and max(taps) >= config.num_target_layers:
        yield f"a tap reads layer {max(taps)} of a target with {config.num_target_layers} layers"
    if min(taps) < -1:
        yield f"a tap reads layer {min(taps)}"
    if config.mask_token_id >= config.vocab_size:
        yield f"the mask token {config.mask_token_id} is not in the vocabulary of {config.vocab_size}"
    if config.block_size > _MOST_BLOCK_TOKENS:
        yield f"a block of {config.block_size} is not plausible"
    if config.output_multiplier == 0 or not math.isfinite(config.output_multiplier):
        yield f"logits are multiplied by {config.output_multiplier:g}"


def _vocabulary_problems(model: ModelFile, config: DecoderConfig) -> Iterator[str]:
    """The problems of a target's tokenizer, which must load and stay inside the embedding table."""
    try:
        tokenizer = Tokenizer.load(model.path, model.file.metadata)
    except SlipstreamError as error:
        yield str(error)
        return
    if tokenizer.vocab_size > config.vocab_size:
        yield f"the tokenizer has {tokenizer.vocab_size} tokens, but the embedding only {config.vocab_size} rows"
    if not tokenizer.eos_ids:
        yield "no token ends an answer, so generation would only stop at its limit"
    outside = [
        index
        for index in (tokenizer.bos_id, *tokenizer.eos_ids)
        if index is not None and not 0 <= index < config.vocab_size
    ]
    if outside:
        yield f"the special token {outside[0]} is not in the vocabulary of {config.vocab_size}"
    raw = read_config(model.path)
    declared = None if raw is None else raw.get("vocab_size")
    if isinstance(declared, int) and "model.embed_tokens.weight" in model.found:
        rows = model.tensors["model.embed_tokens.weight"].shape[0]
        if rows != declared:
            yield f"the config counts {declared} tokens, but the embedding has {rows} rows"


def _known(model: ModelFile) -> Check:
    check = Check("tensors")
    if model.misfit:
        check.problems.append(model.misfit)
        return check
    expected = model.expected
    # Without a configuration there is nothing to compare the tensors with; the metadata check has reported that.
    missing = [name for name in expected if name not in model.found]
    optional = {"lm_head.weight"} if isinstance(model.config, DecoderConfig) else set()
    unused = [name for name in model.found if expected and name not in expected and name not in optional]
    check.seen = f"{len(model.found)} known" + (f", {len(model.ignored)} ignored" if model.ignored else "")
    check.problems += _listed("missing", missing)
    check.problems += _listed("unknown", model.unknown)
    check.problems += _listed("not what the configuration implies", unused)
    wrong = []
    for name, shape in expected.items():
        if name in model.found and (found := model.file.tensor(model.found[name]).shape) != shape:
            wrong.append(f"{name} is {list(found)} and should be {list(shape)}")
    check.problems += _listed("misshapen", wrong)
    return check


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return [f"{what}: {', '.join(names[:MAX_LISTED])}{more}"]


def _finite(model: ModelFile, progress: Progress | None) -> Check:
    check, values = Check("values"), 0
    bad: list[str] = []
    empty: list[str] = []
    for name, own in tracked(list(model.found.items()), "sampling values", progress):
        tensor = model.file.tensor(own)
        try:
            sample = sample_rows(tensor)
        except SlipstreamError as error:
            check.problems.append(f"{name}: {error}")
            continue
        values += sample.numel()
        finite = torch.isfinite(sample)
        if not bool(finite.all()):
            bad.append(f"{name} ({int((~finite).sum())} of {sample.numel()} sampled)")
        elif sample.numel() and not bool(sample.any()) and not name.endswith("bias"):
            empty.append(name)
    check.seen = f"{values} sampled values of {len(model.found)} tensors"
    check.problems += _listed("not finite", bad) + _listed("nothing but zeros", empty)
    return check


def sample_rows(tensor: WeightTensor) -> torch.Tensor:
    """Some rows of a tensor with its first and its last; a short tensor is returned completely."""
    width = math.prod(tensor.shape[1:])
    count = max(2, min(SAMPLED_ROWS, SAMPLED_ELEMENTS // max(1, width)))
    if len(tensor.shape) < 2 or tensor.shape[0] <= count:
        return tensor.dense()
    return tensor.rows(torch.linspace(0, tensor.shape[0] - 1, count).long()).dense()
