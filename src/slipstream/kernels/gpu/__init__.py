"""Triton kernels and the Python code that launches them; nothing here is imported on a machine without a GPU."""

import os

# Quantised weights are scaled by fused multiply-adds, which Triton from 3.10 on does not use unless this is set.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
