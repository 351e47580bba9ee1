"""Triton kernels and what hands them their memory; nothing here is imported on a machine without a GPU."""

import os

# quantised weights are scaled by fused multiply-adds, which Triton from 3.10 on leaves out unless it is told otherwise
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
