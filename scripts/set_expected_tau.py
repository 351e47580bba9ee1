"""Writes a drafter's expected tokens per step, by class of prompts, into its GGUF file; the tensors stay unchanged.

slipstream bench --prompts humaneval --modes chain --json    # tau of "chain" is the value for code, and so on
python scripts/set_expected_tau.py drafter.gguf code=4.7 maths=4.8 chat=1.8
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.formats.gguf import ValueKind
from slipstream.formats.gguf_write import as_read, entries, stored_metadata, write_gguf
from slipstream.formats.weight_files import open_weights
from slipstream.models.dflash import read_drafter_config
from slipstream.models.dflash_config import GGUF_EXPECTED_TAU
from slipstream.tools.convert_plans import tensor_plan


def parse(text: str) -> tuple[str, float]:
    prompts, _, tau = text.partition("=")
    try:
        return prompts, float(tau)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not CLASS=TAU") from None


def rewrite(path: Path, taus: dict[str, float]) -> None:
    """Replaces the expected taus in the file at `path`; if it fails, the old file is kept."""
    stored = stored_metadata(path)
    metadata = {key: value for key, value in stored.items() if not key.startswith(GGUF_EXPECTED_TAU)}
    metadata |= entries({GGUF_EXPECTED_TAU + prompts: tau for prompts, tau in taus.items()}, ValueKind.FLOAT64)
    with open_weights(path) as file:
        # A value that the drafter's reader would refuse must not reach the file.
        file.metadata = as_read(metadata)
        read_drafter_config(path, file)
        tensors = [tensor_plan(tensor.name, tensor, tensor.type_name) for tensor in map(file.tensor, file.names())]
        write_gguf(path, metadata, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "taus", nargs="*", type=parse, metavar="CLASS=TAU", help="without any, the file's expected taus are removed"
    )
    options = parser.parse_args()
    try:
        rewrite(options.file, dict(options.taus))
    except SlipstreamError as error:
        sys.exit(f"set_expected_tau: {error}")


if __name__ == "__main__":
    main()
