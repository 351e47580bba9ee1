"""Triton kernels and the Python code that launches them; running on a CPU imports nothing from here."""

import os

# Quantised weights are scaled by fused multiply-adds, which Triton from 3.10 on does not use unless this is set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
