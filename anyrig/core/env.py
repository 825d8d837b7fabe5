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


def calm_openmp() -> None:
    """Shorten how long torch's OpenMP threads spin at the end of each operation; read once, when torch is imported.

    GNU's default is about a millisecond. On a machine whose cores are also wanted by others, two threads then spend
    their time waiting for each other: a step of one request took 458 ms beside one busy process, and 123 ms with this
    (dev/LOG.md). On an idle machine there is no difference. What the user has set is left alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def cpu_isa() -> str | None:
    """`ANYRIG_CPU_ISA`: use this build of the CPU kernels (avx512, avx2, portable), or none; default the best."""
    return os.environ.get("ANYRIG_CPU_ISA") or None
