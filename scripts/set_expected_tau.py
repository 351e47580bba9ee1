"""Writes what a drafter promises, tokens per step by class of prompts, into its GGUF file; tensors stay as they are.

    slipstream bench --prompts humaneval --modes chain --json    # tau of "chain" is the value for code, and so on
    python scripts/set_expected_tau.py drafter.gguf code=4.7 maths=4.8 chat=1.8
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import gguf

from slipstream.errors import FormatError, SlipstreamError
from slipstream.formats.gguf import GgufHeader, read_gguf
from slipstream.formats.weights import open_weights
from slipstream.models.dflash import read_drafter_config
from slipstream.models.dflash_config import GGUF_EXPECTED_TAU


def parse(text: str) -> tuple[str, float]:
    prompts, _, tau = text.partition("=")
    try:
        return prompts, float(tau)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not CLASS=TAU") from None


def rewrite(path: Path, taus: dict[str, float]) -> None:
    """Replaces the promises in the file at `path`, whole or not at all."""
    before = read_gguf(path)
    partial = path.with_name(path.name + ".partial")
    try:
        _write(path, partial, taus, str(before.metadata["general.architecture"]))
        _compare(path, before, partial, taus)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write(source: Path, out: Path, taus: dict[str, float], architecture: str) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(out), architecture)
    for name, field in reader.fields.items():
        counted = name.startswith("GGUF.") or name == "general.architecture"  # the writer writes these itself
        if not counted and not name.startswith(GGUF_EXPECTED_TAU):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for prompts, tau in taus.items():
        writer.add_float64(f"{GGUF_EXPECTED_TAU}{prompts}", tau)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_shape=tensor.data.shape, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _compare(path: Path, before: GgufHeader, partial: Path, taus: dict[str, float]) -> None:
    """Nothing but the promises may have changed, and the drafter must still be readable."""
    after = read_gguf(partial)
    kept = {key: value for key, value in before.metadata.items() if not key.startswith(GGUF_EXPECTED_TAU)}
    if {key: after.metadata.get(key) for key in kept} != kept or len(after.metadata) != len(kept) + len(taus):
        raise FormatError(f"the metadata of {path.name} did not survive being rewritten")
    old, new = path.read_bytes(), partial.read_bytes()
    for entry, copy in zip(before.tensors, after.tensors, strict=True):
        same_kind = (entry.name, entry.type_name, entry.shape) == (copy.name, copy.type_name, copy.shape)
        if not same_kind or old[entry.offset : entry.end] != new[copy.offset : copy.end]:
            raise FormatError(f"tensor '{entry.name}' of {path.name} did not survive being rewritten")
    read_drafter_config(partial, open_weights(partial))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("taus", nargs="*", type=parse, metavar="CLASS=TAU", help="none: the file promises nothing")
    options = parser.parse_args()
    try:
        rewrite(options.file, dict(options.taus))
    except SlipstreamError as error:
        sys.exit(f"set_expected_tau: {error}")


if __name__ == "__main__":
    main()
