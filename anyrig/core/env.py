"""Every environment variable that anyrig itself reads, typed (`ANYRIG_<OPTION>` aside, see cli/options.py)."""

import os
from pathlib import Path


def home() -> Path:
    """`ANYRIG_HOME`: where models and caches live; default `anyrig` under the user's cache directory (XDG)."""
    if value := os.environ.get("ANYRIG_HOME"):
        return Path(value).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyrig"


def debug() -> bool:
    """`ANYRIG_DEBUG`: show tracebacks, as `--debug` does."""
    return os.environ.get("ANYRIG_DEBUG", "") not in ("", "0")


def hub_offline() -> bool:
    """`HF_HUB_OFFLINE`: never ask a model hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
