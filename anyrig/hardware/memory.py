"""Main memory: what the machine has, and what this process may still take."""

import os
from dataclasses import dataclass
from pathlib import Path

from anyrig.hardware import cgroup, sysfs


@dataclass(frozen=True)
class Memory:
    """All in bytes."""

    total: int
    """What the machine has."""
    limit: int
    """What this process could have at most: the machine's memory or the tightest cgroup limit."""
    available: int
    """What it can still take without swapping: the kernel's ``MemAvailable`` or the cgroup's headroom."""


def read(root: Path = Path("/")) -> Memory:
    """Read ``/proc/meminfo`` and the memory cgroups below ``root``. All 0 where there is no ``/proc``."""
    info = sysfs.table(sysfs.below(root, "/proc/meminfo"), ":")
    kilobytes = {name: sysfs.number(value.split()[0]) or 0 for name, value in info.items() if value}
    total = kilobytes.get("MemTotal", 0) * 1024
    # Kernels before 3.14 have no MemAvailable; free memory plus page cache is near it.
    free = kilobytes.get("MemFree", 0) + kilobytes.get("Cached", 0)
    available = kilobytes.get("MemAvailable", free) * 1024
    group = cgroup.memory(root)
    limit = total if group.limit is None else min(total, group.limit)
    headroom = limit if group.headroom is None else group.headroom
    return Memory(total=total, limit=limit, available=min(available, headroom, limit))


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process can still take without swapping, cgroup limits considered."""
    return read(root).available


def shared_bytes(root: Path = Path("/")) -> int | None:
    """Bytes in ``/dev/shm``, where Ray's objects and torch's workers live, or ``None`` if there is none."""
    try:
        status = os.statvfs(sysfs.below(root, "/dev/shm"))
    except OSError:
        return None
    return status.f_blocks * status.f_frsize
