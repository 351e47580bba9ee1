"""Builds the native CPU kernels with the system's compiler; where that fails the package installs without them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/slipstream/kernels/cpu/native")
# every kernel is compiled once per instruction set, and the module picks the best one the machine has
KERNELS = ("matmul.cpp", "attention.cpp", "step.cpp", "sampling.cpp", "growth.cpp", "floors.cpp")
COMMON = ("team.cpp", "module.cpp", "pack.cpp", "rows.cpp", "text_index.cpp")
FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",  # GCC's own intrinsics use undefined registers
]
ISA_FLAGS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
}
AMX_FLAGS = [*ISA_FLAGS["avx512"], "-mamx-tile", "-mamx-int8"]


class NativeBuild(build_ext):
    """One shared library out of sources that need different instruction sets."""

    def build_extension(self, ext: Extension) -> None:
        def compile_source(name: str, isa: str, flags: list[str]) -> list[str]:
            return self.compiler.compile(
                [str(FOLDER / name)],
                os.path.join(self.build_temp, isa),
                extra_postargs=[*FLAGS, *flags],
                depends=ext.depends,
                macros=[("SLIP_ISA", isa)],
            )

        # the linker keeps the first of several copies of an inline function, so the plainest machine's come first
        jobs: list[tuple[str, str, list[str]]] = [(name, "common", []) for name in COMMON]
        jobs += [(name, isa, flags) for isa, flags in ISA_FLAGS.items() for name in KERNELS]
        jobs.append(("amx.cpp", "amx", AMX_FLAGS))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [made for one in pool.map(compile_source, *zip(*jobs, strict=True)) for made in one]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread"], target_lang="c++"
        )


setup(
    ext_modules=[
        Extension(
            "slipstream.kernels.cpu._rows",
            sources=[str(path) for path in sorted(FOLDER.glob("*.cpp"))],
            depends=[str(path) for path in sorted(FOLDER.glob("*.h"))],
            optional=True,
        )
    ],
    cmdclass={"build_ext": NativeBuild},
)
