"""AMD GPUs from the kernel's own files, without any ROCm tool.

kfd (the compute driver) lists every CPU and GPU as a node in ``/sys/class/kfd/kfd/topology/nodes/<n>``: one
``name value`` per line in ``properties``, and the memory in ``mem_banks/<k>/properties``. A program needs ``/dev/kfd``
and the GPU's render node ``/dev/dri/renderD<minor>``, both for reading and writing. The topology can be read in a
container even where these may not be opened.
Format: https://docs.kernel.org/gpu/amdgpu/index.html, real captures in ROCm/k8s-device-plugin:testdata
"""

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from anyrig.hardware import amd_targets, device_node, pci, sysfs
from anyrig.hardware.device_node import DeviceNode, Probe

_PAGE_BYTES = 4096


@dataclass(frozen=True)
class AmdGpu:
    """One device as ROCm counts them: a card, one of the two chips of an MI250, or one partition of an MI300."""

    node: int
    """Number in kfd's topology."""
    index: int | None
    """Number among the openable devices, in kfd's order, which ROCm's own numbers follow; ``None`` if not openable."""
    gfx: str | None
    """Target name, for example ``gfx942``; ``None`` where neither the kernel nor the table of targets knows it."""
    gfx_from_table: bool
    """The kernel is too old to name the target: it was looked up by PCI id."""
    name: str
    bus: str
    device_id: int
    unique_id: int
    """The chip's serial number, the same for all its partitions; 0 if it has none."""
    units: int
    """Compute units of this device."""
    wave: int
    """Threads in a wave."""
    partition: int
    partitions: int
    """How many devices the chip is split into (CPX: 8 for an MI300X)."""
    memory: int
    """Bytes that programs can allocate; for an APU this is system memory that the driver may hand out (GTT)."""
    apu: bool
    carve_out: int
    """Bytes of system memory that firmware set aside for an APU's graphics and that ROCm does not use; 0 for cards."""
    render: DeviceNode

    @property
    def uuid(self) -> str | None:
        """The name that ROCR_VISIBLE_DEVICES takes and rocminfo prints."""
        return f"GPU-{self.unique_id:016x}" if self.unique_id else None

    @property
    def target(self) -> amd_targets.Target | None:
        """What is known of the target, or ``None`` if it is not in the table."""
        return amd_targets.targets().get(self.gfx or "")


@dataclass(frozen=True)
class Amd:
    """Everything AMD in the machine."""

    gpus: tuple[AmdGpu, ...]
    kfd: DeviceNode
    hidden_nodes: int
    """Topology nodes that may not be read: GPUs that the container's device rules keep from this process."""
    pci_cards: tuple[pci.PciCard, ...]
    driver_loaded: bool

    @property
    def usable(self) -> tuple[AmdGpu, ...]:
        """The GPUs that a program started here can open."""
        return tuple(gpu for gpu in self.gpus if gpu.index is not None)


def read(root: Path = Path("/"), probe: Probe = device_node.probe) -> Amd:
    """Find AMD GPUs below ``root``.

    Args:
        probe: how device files are looked at; for tests, since root may open anything.
    """
    kfd = probe("/dev/kfd", root)
    found, hidden = [], 0
    for folder in sysfs.entries(sysfs.below(root, "/sys/class/kfd/kfd/topology/nodes")):
        if sysfs.text(folder / "properties") is None:
            hidden += 1
            continue
        values = sysfs.numbers(folder / "properties")
        if values.get("simd_count", 0) > 0:
            found.append(_gpu(folder, values, root, probe))
    return Amd(
        gpus=_numbered(_grouped(found), kfd),
        kfd=kfd,
        hidden_nodes=hidden,
        pci_cards=tuple(pci.cards(pci.AMD, root)),
        driver_loaded=sysfs.below(root, "/sys/module/amdgpu").exists(),
    )


def _gpu(folder: Path, values: dict[str, int], root: Path, probe: Probe) -> AmdGpu:
    location, device_id = values.get("location_id", 0), values.get("device_id", 0)
    gfx = amd_targets.gfx_name(values.get("gfx_target_version", 0))
    looked_up = amd_targets.by_device_id(device_id) if gfx is None else None
    gfx = looked_up.gfx if looked_up else gfx
    minor = values.get("drm_render_minor", 0)
    memory = _memory(folder, values)
    units = values["simd_count"] // max(1, values.get("simd_per_cu", 0))
    target = amd_targets.targets().get(gfx or "")
    # Old APUs (and only they) have CPU cores in the same node.
    apu = values.get("cpu_cores_count", 0) > 0
    apu = apu or (target is not None and all(item.apu for item in target.products))
    product = amd_targets.product(gfx, device_id, units, memory)
    apu = apu or (product is not None and product.apu)
    return AmdGpu(
        node=int(folder.name),
        index=None,
        gfx=gfx,
        gfx_from_table=looked_up is not None,
        name=product.name if product else f"AMD GPU 0x{device_id:04x}",
        bus=bus_name(values.get("domain", 0), location),
        device_id=device_id,
        unique_id=values.get("unique_id", 0),
        units=units,
        wave=values.get("wave_front_size", 0) or (target.wave if target else 0),
        partition=0,
        partitions=1,
        memory=memory,
        apu=apu,
        carve_out=_carve_out(minor, root) if apu and values.get("local_mem_size", 0) == 0 else 0,
        render=probe(f"/dev/dri/renderD{minor}", root) if minor else DeviceNode("/dev/dri/renderD?", "missing"),
    )


def bus_name(domain: int, location: int) -> str:
    """The PCI address of kfd's ``location_id``: bus in the high byte, then 5 bits of device and 3 of function."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _memory(folder: Path, values: dict[str, int]) -> int:
    """Sum of the banks that belong to the device (heap types 1 and 2; 0 is system memory).

    ``local_mem_size`` is 0 on present kernels and only asked where there is no bank (old captures).
    """
    banks = [sysfs.numbers(bank / "properties") for bank in sysfs.entries(folder / "mem_banks")]
    total = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2))
    return total or values.get("local_mem_size", 0)


def _carve_out(render_minor: int, root: Path) -> int:
    device = sysfs.below(root, f"/sys/class/drm/renderD{render_minor}/device")
    return sysfs.integer(device / "mem_info_vram_total") or 0


def _grouped(gpus: list[AmdGpu]) -> list[AmdGpu]:
    """Count the partitions of each chip: they share unique_id and PCI bus and differ in the function number."""
    keys = [(gpu.unique_id, gpu.bus.rpartition(":")[0]) if gpu.unique_id else gpu.node for gpu in gpus]
    sizes, seen = Counter(keys), Counter[object]()
    grouped = []
    for key, gpu in zip(keys, gpus, strict=True):
        whole = gpu.units * sizes[key]
        if sizes[key] > 1 and (product := amd_targets.product(gpu.gfx, gpu.device_id, whole, gpu.memory * sizes[key])):
            gpu = replace(gpu, name=product.name)
        grouped.append(replace(gpu, partition=seen[key], partitions=sizes[key]))
        seen[key] += 1
    return grouped


def _numbered(gpus: list[AmdGpu], kfd: DeviceNode) -> tuple[AmdGpu, ...]:
    index = 0
    numbered = []
    for gpu in gpus:
        if kfd.state == "ok" and gpu.render.state == "ok":
            gpu = replace(gpu, index=index)
            index += 1
        numbered.append(gpu)
    return tuple(numbered)


def shared_memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of system memory that the driver hands to an APU at most (``ttm.pages_limit``), or ``None`` if not told."""
    pages = sysfs.integer(sysfs.below(root, "/sys/module/ttm/parameters/pages_limit"))
    return pages * _PAGE_BYTES if pages else None
