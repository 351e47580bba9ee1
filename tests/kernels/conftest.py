"""Triton's interpreter stands in for a GPU: it must be chosen before triton is imported for the first time."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
