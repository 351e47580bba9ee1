"""Triton's interpreter stands in for a GPU: it must be chosen before triton is imported for the first time."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
import torch


def _sum_in_float64() -> None:
    """Lets the interpreter's `tl.dot` sum in float64 and round once.

    The order in which numpy's BLAS sums a row depends on the row's place in the matrix and on the processor. Tests
    compare rows to the bit, because tensor cores have one order; with BLAS they fail on some processors (AMD's, say).
    """
    from triton.language import float64
    from triton.runtime import interpreter

    usual = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if d.data.dtype != np.float32:
            return usual(builder, a, b, d, *rest)
        zero = interpreter.TensorHandle(np.zeros_like(d.data, dtype=np.float64), float64)
        product = usual(builder, a, b, zero, *rest)
        return interpreter.TensorHandle(product.data.astype(np.float32) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        _sum_in_float64()
