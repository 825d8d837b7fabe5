"""Everything that doctor judges, gathered in one place: the only part of the diagnosis that touches the machine."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from anyrig.core import env
from anyrig.hardware import amd, cpu, device_node, memory, nvidia, toolchain, torch_build
from anyrig.hardware.device_node import Probe


@dataclass(frozen=True)
class Facts:
    """One machine, one environment, one Python."""

    cpu: cpu.Cpu
    amd: amd.Amd
    nvidia: nvidia.Nvidia
    torch: torch_build.TorchBuild | None
    environment: Mapping[str, str]
    compilers: Mapping[str, str]
    packages: Mapping[str, str]
    cache: Path
    """Where models and caches go."""
    cache_free: int
    """Bytes free on its disk."""
    cache_writable: bool
    python: tuple[int, int, int] = field(default_factory=lambda: sys.version_info[:3])
    shared_memory: int | None = None
    """Bytes in ``/dev/shm``."""
    shared_limit: int | None = None
    """Bytes of system memory that the driver hands to an APU at most."""
    container: bool = False
    deep: torch_build.Deep | None = None
    kernels: toolchain.Kernels | None = None
    """The CPU kernels, or ``None`` where nobody looked."""


def collect(
    root: Path = Path("/"),
    probe: Probe = device_node.probe,
    deep: bool = False,
    kernels: toolchain.Kernels | None = None,
) -> Facts:
    """Read this machine (with ``root``, another one's files); about a quarter of a second without ``deep``.

    ``kernels`` comes from `anyrig.ops.cpu.native.report`, which stands above this package.
    """
    cache = env.home()
    disk = existing_parent(cache)
    return Facts(
        cpu=cpu.read(root),
        amd=amd.read(root, probe),
        nvidia=nvidia.read(root, probe),
        torch=torch_build.read(),
        environment=dict(os.environ),
        compilers=toolchain.compilers(),
        packages=toolchain.packages(),
        cache=cache,
        cache_free=shutil.disk_usage(disk).free,
        cache_writable=disk.is_dir() and os.access(disk, os.W_OK | os.X_OK),
        shared_memory=memory.shared_bytes(root),
        shared_limit=amd.shared_memory_limit(root),
        container=device_node.in_container(root),
        deep=torch_build.deep() if deep else None,
        kernels=kernels,
    )


def existing_parent(path: Path) -> Path:
    """The path itself or the nearest folder above it that exists already."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
