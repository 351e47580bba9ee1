"""Where Slipstream keeps files that outlive a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def user_cache() -> Path:
    """Returns the folder for downloaded models and stored measurements; SLIPSTREAM_CACHE names another one."""
    chosen = os.environ.get("SLIPSTREAM_CACHE")
    if chosen:
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "slipstream"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", str(Path.home()))) / "slipstream"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slipstream"
