"""Writes a DFlash drafter folder as one GGUF file (llama.cpp's conventions), matrices in Q8_0 or BF16.

    python scripts/pack_drafter.py path/to/drafter src/slipstream/data/smollm2-135m-dflash.Q8_0.gguf --type q8_0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf

from slipstream.errors import SlipstreamError
from slipstream.formats.gguf_write import write_gguf
from slipstream.tools.convert_drafter import to_gguf

Type = gguf.GGMLQuantizationType
TYPES = {"q8_0": Type.Q8_0, "bf16": Type.BF16}


def pack(folder: Path, out: Path, matrix_type: Type) -> None:
    """Writes the drafter in `folder` to the GGUF file `out`."""
    made = to_gguf(folder, matrix_type.name, "llama.cpp", None)
    write_gguf(out, made.metadata, made.tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=tuple(TYPES), default="q8_0")
    options = parser.parse_args()
    try:
        pack(options.folder, options.out, TYPES[options.type])
    except SlipstreamError as error:
        sys.exit(f"pack_drafter: {error}")


if __name__ == "__main__":
    main()
