"""The CPU as this process may use it: cores, instruction sets, memory.

Sources: ``/proc/cpuinfo``, ``Cpus_allowed_list`` of ``/proc/self/status`` (affinity and cpuset), the cgroups' quota.
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from anyrig.hardware import cgroup, memory, sysfs

#: Instruction sets that our kernels or torch's choose between, by the kernel's names (x86, then ARM).
INSTRUCTION_SETS = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)


@dataclass(frozen=True)
class Cpu:
    """One machine's CPUs as far as this process may use them. Memory in bytes."""

    model: str
    architecture: str
    """``x86_64``, ``aarch64``, ..."""
    machine_cores: int
    """Logical CPUs that are online in the machine."""
    allowed_cores: int
    """Logical CPUs that affinity and cpuset leave to this process."""
    quota: float | None
    """CPUs' worth of time that the cgroups grant, or ``None``."""
    cores: int
    """Compute threads to start: allowed cores, or the quota rounded down (one throttled thread stalls the rest)."""
    physical_cores: int
    """Allowed cores without hyper-threads, at most ``cores``; equal to ``cores`` where the kernel does not tell."""
    flags: frozenset[str]
    memory_total: int
    memory_limit: int
    memory_available: int

    @property
    def instruction_sets(self) -> list[str]:
        """Those of `INSTRUCTION_SETS` that the CPU has."""
        return [name for name in INSTRUCTION_SETS if name in self.flags]

    @property
    def native_bf16(self) -> bool:
        """Whether bf16 products are computed in hardware rather than by widening to fp32."""
        return bool(self.flags & {"avx512_bf16", "amx_bf16", "bf16"})

    @property
    def native_int8(self) -> bool:
        """Whether there is an int8 dot-product instruction."""
        return bool(self.flags & {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp"})

    @property
    def simd_bits(self) -> int:
        """Width of a vector register in bits, as far as the flags tell (SVE counts as 128, its least)."""
        if "avx512f" in self.flags:
            return 512
        return 256 if "avx2" in self.flags else 128


def read(root: Path = Path("/")) -> Cpu:
    """Read the CPU from the files below ``root``."""
    processors = _processors(root)
    first = processors[0] if processors else {}
    status = sysfs.table(sysfs.below(root, "/proc/self/status"), ":")
    online = sysfs.id_list(sysfs.text(sysfs.below(root, "/sys/devices/system/cpu/online")))
    machine = len(online) or len(processors) or os.cpu_count() or 1
    allowed = sysfs.id_list(status.get("Cpus_allowed_list")) or list(range(machine))
    # The mask may name CPUs that could be plugged in; only those online count.
    allowed = [cpu for cpu in allowed if not online or cpu in online] or allowed
    quota = cgroup.cpu_quota(root)
    cores = len(allowed) if quota is None else max(1, min(len(allowed), int(quota)))
    room = memory.read(root)
    return Cpu(
        model=first.get("model name") or first.get("Processor") or f"unnamed {platform.machine()} CPU",
        architecture=platform.machine(),
        machine_cores=machine,
        allowed_cores=len(allowed),
        quota=quota,
        cores=cores,
        physical_cores=min(cores, _physical(processors, set(allowed)) or cores),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
        memory_total=room.total,
        memory_limit=room.limit,
        memory_available=room.available,
    )


def _processors(root: Path) -> list[dict[str, str]]:
    """One table per block of ``/proc/cpuinfo`` that describes a processor."""
    blocks = (sysfs.text(sysfs.below(root, "/proc/cpuinfo")) or "").split("\n\n")
    tables = []
    for block in blocks:
        rows = (line.partition(":") for line in block.splitlines())
        tables.append({name.strip(): value.strip() for name, colon, value in rows if colon})
    return [table for table in tables if "processor" in table]


def _physical(processors: list[dict[str, str]], allowed: set[int]) -> int:
    """Distinct (socket, core) pairs among the allowed CPUs; 0 where cpuinfo does not name them (ARM)."""
    cores = set()
    for processor in processors:
        if sysfs.number(processor["processor"]) in allowed and "core id" in processor:
            cores.add((processor.get("physical id"), processor["core id"]))
    return len(cores)
