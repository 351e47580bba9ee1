"""The number of threads of native kernels: one for the process, because all its engines share one team of threads."""

from __future__ import annotations

import torch

_chosen = 0


def set_threads(count: int) -> None:
    """Sets the size of the team; 0 means as many threads as torch uses."""
    global _chosen
    _chosen = count


def threads() -> int:
    return _chosen or torch.get_num_threads()
