"""Machines as trees of the kernel's files, in the documented formats; the numbers are those of real captures.

MI210 and MI300X in CPX mode: ROCm/k8s-device-plugin:testdata. Old kernel: the same, topology-parsing (a Vega card).
R9700 and Ryzen AI Max: properties that owners published. NVIDIA: the driver's information file of an H100.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from anyrig.hardware import amd, cpu, device_node, nvidia
from anyrig.hardware.device_node import DeviceNode, Probe
from anyrig.hardware.facts import Facts
from anyrig.hardware.torch_build import Kind, TorchBuild

GIB = 2**30
NODES = "sys/class/kfd/kfd/topology/nodes"

CPU_NODE = {"cpu_cores_count": 64, "simd_count": 0, "gfx_target_version": 0, "vendor_id": 0, "device_id": 0}
MI210 = {
    "cpu_cores_count": 0,
    "simd_count": 416,
    "wave_front_size": 64,
    "simd_per_cu": 4,
    "gfx_target_version": 90010,
    "vendor_id": 4098,
    "device_id": 29711,
    "location_id": 25344,
    "domain": 0,
    "drm_render_minor": 128,
    "local_mem_size": 0,
    "unique_id": 1801979520617338022,
    "num_xcc": 1,
}
MI300X_PARTITION = {
    **MI210,
    "simd_count": 152,
    "gfx_target_version": 90402,
    "device_id": 29857,
    "location_id": 1280,
    "unique_id": 16404946649897475633,
}
RYZEN_AI_MAX = {
    **MI210,
    "simd_count": 80,
    "wave_front_size": 32,
    "simd_per_cu": 2,
    "gfx_target_version": 110501,
    "device_id": 5510,
    "location_id": 0xC500,
    "unique_id": 0,
}
R9700 = {
    **MI210,
    "simd_count": 128,
    "wave_front_size": 32,
    "simd_per_cu": 2,
    "gfx_target_version": 120001,
    "device_id": 0x7551,
    "location_id": 1280,
    "unique_id": 0x5BD3148DC76B831A,
}
OLD_VEGA = {
    "cpu_cores_count": 0,
    "simd_count": 256,
    "wave_front_size": 64,
    "simd_per_cu": 4,
    "vendor_id": 4098,
    "device_id": 26720,
    "location_id": 6400,
    "drm_render_minor": 128,
    "local_mem_size": 17163091968,
    "unique_id": 14073402507705256556,
}
H100 = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 10
GPU UUID: \t GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b
Video BIOS: \t 96.00.99.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:62:00.0
Device Minor: \t 5
GPU Firmware: \t 535.129.03
GPU Excluded:\t No
"""
EPYC = """processor\t: {n}
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
physical id\t: 0
core id\t\t: {core}
flags\t\t: fpu sse2 avx2 fma f16c avx512f avx512bw avx512_bf16 avx512_vnni
"""
SYSTEMD_V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


class Tree:
    """A machine's file system below ``root``, filled step by step."""

    def __init__(self, root: Path, cores: int = 8, memory: int = 64 * GIB) -> None:
        self.root = root
        # Two threads per core, as the kernel numbers them: the second half are the siblings.
        blocks = (EPYC.format(n=n, core=n % max(1, cores // 2)) for n in range(cores))
        self.write("proc/cpuinfo", "\n".join(blocks))
        self.write(
            "proc/meminfo", f"MemTotal: {memory // 1024} kB\nMemFree: 1024 kB\nMemAvailable: {memory // 2048} kB"
        )
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-{cores - 1}\n")
        self.write("sys/devices/system/cpu/online", f"0-{cores - 1}\n")
        self.write("etc/group", "root:x:0:\nvideo:x:44:\nrender:x:109:\n")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    def node(self, number: int, properties: Mapping[str, int], *banks: tuple[int, int]) -> "Tree":
        """A topology node; banks are (heap_type, bytes). Its render node and ``/dev/kfd`` appear as well."""
        folder = f"{NODES}/{number}"
        self.write(f"{folder}/properties", "".join(f"{name} {value}\n" for name, value in properties.items()))
        for bank, (heap, count) in enumerate(banks):
            lines = f"heap_type {heap}\nsize_in_bytes {count}\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
            self.write(f"{folder}/mem_banks/{bank}/properties", lines)
        if minor := properties.get("drm_render_minor"):
            self.write(f"dev/dri/renderD{minor}", "")
            self.write("dev/kfd", "")
        return self

    def pci(self, bus: str, vendor: int, device: int, kind: int) -> "Tree":
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            self.write(f"sys/bus/pci/devices/{bus}/{name}", f"0x{value:04x}\n")
        return self


def mi210(root: Path) -> Tree:
    tree = Tree(root).node(0, CPU_NODE, (0, 256 * GIB)).node(1, CPU_NODE, (0, 256 * GIB))
    return tree.node(2, MI210, (1, 64 * GIB)).pci("0000:63:00.0", 0x1002, 0x740F, 0x038000)


def mi300x_cpx(root: Path) -> Tree:
    """One MI300X split into eight, and behind it the first part of a second card."""
    tree = Tree(root).node(0, CPU_NODE, (0, 1024 * GIB))
    for part in range(8):
        place = {"location_id": 1280 + part, "drm_render_minor": 128 + part}
        tree.node(2 + part, MI300X_PARTITION | place, (1, 24 * GIB))
    other = {"location_id": 9984, "drm_render_minor": 136, "unique_id": 2472748907779728154}
    return tree.node(10, MI300X_PARTITION | other, (1, 24 * GIB))


def ryzen_ai_max(root: Path, shared: int, carve_out: int, memory: int) -> Tree:
    tree = Tree(root, memory=memory).node(0, CPU_NODE).node(1, RYZEN_AI_MAX, (1, shared))
    tree.write("sys/class/drm/renderD128/device/mem_info_vram_total", carve_out)
    tree.write("sys/module/ttm/parameters/pages_limit", shared // 4096)
    return tree


def h100(root: Path) -> Tree:
    tree = Tree(root).pci("0000:62:00.0", 0x10DE, 0x2330, 0x030200)
    tree.write("proc/driver/nvidia/gpus/0000:62:00.0/information", H100)
    tree.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19\n")
    for name in ("nvidiactl", "nvidia-uvm", "nvidia5"):
        tree.write(f"dev/{name}", "")
    return tree


def denied(*paths: str, gid: int = 109, group: str | None = "render") -> Probe:
    """A probe for which these files may not be opened; files are otherwise as the tree has them."""

    def probe(path: str, root: Path) -> DeviceNode:
        return DeviceNode(path, "denied", gid, group) if path in paths else device_node.probe(path, root)

    return probe


def build(kind: Kind, version: str = "2.9.0", toolkit: str | None = None, targets: tuple[str, ...] = ()) -> TorchBuild:
    toolkit = toolkit or {"cpu": None, "cuda": "12.8", "rocm": "7.0.51831-7c9236b16", "xpu": "2025"}[kind]
    return TorchBuild(version, kind, toolkit, Path("/venv/torch"), targets)


def facts(
    tree: Tree,
    torch: TorchBuild | None,
    environment: Mapping[str, str] | None = None,
    probe: Probe = device_node.probe,
    **changes: object,
) -> Facts:
    """The tree's machine with this torch and environment, and nothing else to complain about."""
    whole = Facts(
        cpu=replace(cpu.read(tree.root), architecture="x86_64"),
        amd=amd.read(tree.root, probe),
        nvidia=nvidia.read(tree.root, probe),
        torch=torch,
        environment=environment or {},
        compilers={"g++": "13.2.0"},
        packages={"torch": "2.9.0"},
        cache=Path("/home/me/.cache/anyrig"),
        cache_free=500 * GIB,
        cache_writable=True,
        shared_limit=amd.shared_memory_limit(tree.root),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]
