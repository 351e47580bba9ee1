"""Where things that outlive a process are kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """The folder for downloaded models and remembered measurements; SLIPSTREAM_CACHE moves it."""
    chosen = os.environ.get("SLIPSTREAM_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slipstream"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "slipstream"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
