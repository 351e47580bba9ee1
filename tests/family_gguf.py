"""Writes tiny family targets as GGUF files with `slipstream convert`, and converts them back."""

# mypy: disable-error-code="has-type, misc, unused-ignore"

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedModel

from slipstream.tools.conversion import convert
from slipstream.tools.quantize_recipes import RecipeName
from slipstream.tools.requantize import quantize_file
from tests.oracles import edit_config, save_model


def save_family(model: PreTrainedModel, folder: Path) -> Path:
    """Saves the model as a folder that can be converted; its tokens spell their own ids, so that text shows the ids."""
    save_model(model, folder)
    backend = Backend(models.BPE({f"[{token}]": token for token in range(model.config.vocab_size)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    edit_config(folder, eos_token_id=0)
    return folder


def write_family_gguf(model: PreTrainedModel, path: Path, recipe: RecipeName | None = None) -> Path:
    """Writes the model in F32, or as `slipstream quantize` makes it from that file."""
    convert(save_family(model, path.with_suffix("")), path)
    if recipe is None:
        return path
    quantised = path.with_stem(f"{path.stem}-{recipe}")
    quantize_file(path, quantised, recipe)
    return quantised


def read_back(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """The oracle with the values of a GGUF file, read from the folder that the file is converted back to."""
    convert(path, path.with_suffix(".back"))
    found, report = type(model).from_pretrained(
        path.with_suffix(".back"), dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    loaded: PreTrainedModel = found.eval()
    return loaded
