"""How many threads native kernels use: one number for the process, as all engines share one team."""

from __future__ import annotations

import torch

_chosen = 0


def set_threads(count: int) -> None:
    """Sizes the team; 0 follows torch's own number."""
    global _chosen
    _chosen = count


def threads() -> int:
    return _chosen or torch.get_num_threads()
