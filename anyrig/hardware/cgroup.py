"""What this process's control groups allow: CPU quota and memory, for cgroup v1, v2 and the hybrid of both.

A limit of a parent group binds as much as one's own, so every level up to the mount point is looked at.
Formats: https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from anyrig.hardware import sysfs

# "No limit" in v1 is the largest page-aligned number of 63 bits; nobody sets a real limit above this.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest memory bounds over all levels, in bytes; ``None`` where no group limits memory."""

    limit: int | None
    headroom: int | None
    """How much more can be used: limit minus usage, page cache counted as free since the kernel gives it back."""


def _folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that governs this process, from its own up to the mount point."""
    membership: dict[str, str] = {}
    for line in (sysfs.text(sysfs.below(root, "/proc/self/cgroup")) or "").splitlines():
        _, names, group = line.split(":", 2)
        membership.update(dict.fromkeys(names.split(","), group))
    for line in (sysfs.text(sysfs.below(root, "/proc/self/mountinfo")) or "").splitlines():
        fields, _, options = line.partition(" - ")
        kind, _, super_options = [*options.split(), "", "", ""][:3]
        mount_root, mount_point = fields.split()[3:5]
        if kind == "cgroup2":
            version, path = 2, membership.get("")
        elif kind == "cgroup" and controller in super_options.split(","):
            version, path = 1, membership.get(controller)
        else:
            continue
        if path is None:
            continue
        yield from ((version, folder) for folder in _upwards(sysfs.below(root, mount_point), mount_root, path))


def _upwards(mount: Path, mount_root: str, path: str) -> Iterator[Path]:
    """The group's folder and its parents; in a container, where the path may lie outside the mount, the mount."""
    relative = PurePosixPath(path)
    if mount_root != "/":
        relative = relative.relative_to(mount_root) if relative.is_relative_to(mount_root) else PurePosixPath()
    parts = [part for part in relative.parts if part != "/"]
    folder = mount if ".." in parts else mount.joinpath(*parts)
    if not folder.is_dir():
        folder = mount
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the tightest group grants (``1.5``: one and a half), or ``None`` for no quota."""
    quotas = []
    for version, folder in _folders(root, "cpu"):
        if version == 2:
            quota, _, period = (sysfs.text(folder / "cpu.max") or "").partition(" ")
            granted, per = sysfs.number(quota), sysfs.number(period)
        else:
            granted = sysfs.integer(folder / "cpu.cfs_quota_us")
            per = sysfs.integer(folder / "cpu.cfs_period_us")
        if granted and per and granted > 0:
            quotas.append(granted / per)
    return min(quotas, default=None)


def memory(root: Path = Path("/")) -> MemoryLimit:
    """The tightest memory limit and the smallest headroom over all levels (they may belong to different groups)."""
    limits, headrooms = [], []
    for version, folder in _folders(root, "memory"):
        stat = sysfs.numbers(folder / "memory.stat")
        if version == 2:
            # Above memory.high the kernel throttles the process until it crawls: as good as a wall.
            bounds = [sysfs.integer(folder / "memory.max"), sysfs.integer(folder / "memory.high")]
            used = sysfs.integer(folder / "memory.current")
            cache = stat.get("active_file", 0) + stat.get("inactive_file", 0) + stat.get("slab_reclaimable", 0)
        else:
            # The hierarchical number also tells of parents that a container cannot see.
            bounds = [sysfs.integer(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
            used = sysfs.integer(folder / "memory.usage_in_bytes")
            cache = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
        limit = min((bound for bound in bounds if bound is not None and bound < _UNLIMITED), default=None)
        if limit is not None:
            limits.append(limit)
            if used is not None:
                headrooms.append(max(0, limit - max(0, used - cache)))
    return MemoryLimit(min(limits, default=None), min(headrooms, default=None))
