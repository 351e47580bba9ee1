"""Opens a model folder or file, finds out which family it is, chooses a weight format by measurement, and builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from slipstream.config import WeightFormat
from slipstream.errors import ConfigError
from slipstream.formats.weight_files import WeightFile, open_weights, read_config
from slipstream.kernels.cpu.native_library import availability, library
from slipstream.kernels.machine import measure_formats, pick_format
from slipstream.models import gemma4, laguna, llama, qwen3, qwen3_5
from slipstream.models.config_reading import ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, FamilyNames
from slipstream.models.weights import Weights
from slipstream.types import Progress

MakeWeights = Callable[..., Weights]
# Families by Hugging Face's model type and, where that is another name, by GGUF's architecture. The module of a family
# has `MODEL`, the class that says what its layers consist of, and the functions `read_hf` and `read_gguf`.
FAMILIES: dict[str, ModuleType] = {
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "laguna": laguna,
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen35": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "qwen35moe": qwen3_5,
    "qwen3_moe": qwen3,
    "qwen3moe": qwen3,
}


@dataclass(frozen=True, slots=True)
class LoadedTarget:
    """A target, the metadata of its file, and the reason for the format of its weights."""

    model: Decoder
    metadata: dict[str, object]
    format_reason: str


def load_target(
    path: Path, weight_format: WeightFormat, progress: Progress | None = None, elsewhere: MakeWeights | None = None
) -> LoadedTarget:
    """Builds the target at `path`, with its weights in the CPU's memory unless `elsewhere` loads them onto a device."""
    file = open_weights(path)
    family, decoder_config, names = _read(path, file)
    make, chosen, reason = elsewhere or Weights, weight_format, "asked for"
    if elsewhere is None:
        outputs, inputs = 2 * decoder_config.intermediate_size, decoder_config.hidden_size
        chosen, reason = choose_format(file, weight_format, outputs, inputs)
    elif weight_format != "bf16":
        reason = "the file's own types"
    weights = make(file, chosen, names.file_name, progress, norm_shift=names.norm_shift)
    return LoadedTarget(family.MODEL(decoder_config, weights, names), file.metadata, reason)


def read_target_config(path: Path, file: WeightFile) -> tuple[DecoderConfig, FamilyNames]:
    """Reads the configuration of the target at `path`, and returns it with how its file spells tensors."""
    return _read(path, file)[1:]


def _read(path: Path, file: WeightFile) -> tuple[ModuleType, DecoderConfig, FamilyNames]:
    config = read_config(path)
    label, key = (file.path.name, "general.architecture") if config is None else (path.name, "model_type")
    reader = ConfigReader(file.metadata if config is None else config, label)
    model_type = reader.text(key)
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"{label}: model type '{model_type}' is not a supported target", f"supported: {', '.join(sorted(FAMILIES))}"
        )
    read = family.read_gguf(reader, Weights(file, "fp32")) if config is None else family.read_hf(reader)
    return family, *read


def choose_format(file: WeightFile, asked: WeightFormat, outputs: int, inputs: int) -> tuple[WeightFormat, str]:
    """Returns format and reason; `auto` takes the file's types with compiled kernels, else torch's fastest format."""
    kinds = {tensor.type_name for tensor in map(file.tensor, file.names()) if len(tensor.shape) > 1}
    four_bit = bool(kinds & {"Q4_0", "Q4_1"})
    if asked == "int4" and not four_bit:
        raise ConfigError(f"{file.path.name} has no Q4_0 or Q4_1 weights to run as int4", "use --dtype int8 or auto")
    if asked != "auto":
        return asked, "asked for"
    compiled, reason = library(), availability().reason
    if compiled is not None:
        return "native", reason
    chosen, measured_reason = _fastest_torch_format(kinds, four_bit, outputs, inputs)
    return chosen, f"{reason}; {measured_reason}"


def _fastest_torch_format(kinds: set[str], four_bit: bool, outputs: int, inputs: int) -> tuple[WeightFormat, str]:
    candidates: list[WeightFormat]
    if kinds <= {"F32", "F64"}:
        return "fp32", "the file's own precision"
    if kinds <= {"F32", "F16"}:
        candidates = ["fp32", "fp16"]
    elif kinds <= {"F32", "BF16"}:
        candidates = ["fp32", "bf16"]
    else:
        candidates = ["fp32", "bf16", "int8", *(["int4"] if four_bit else [])]  # type: ignore[list-item]
    measured = measure_formats(candidates, outputs, inputs)
    chosen = pick_format(measured)
    times = ", ".join(f"{name} {one:.2f}/{many:.2f}" for name, (one, many) in measured.items())
    return chosen, f"fastest of (ms for 1/16 rows of one {outputs}x{inputs} matrix): {times}"
