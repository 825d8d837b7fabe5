"""NVIDIA GPUs from the driver's own files; memory from NVML where the driver's library is there (never a dependency).

``/proc/driver/nvidia/gpus/<bus>/information`` names the model and the device minor, ``/proc/driver/nvidia/version`` the
driver. Memory and compute capability are in no file: `nvml.read` asks the driver for them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyrig.hardware import device_node, nvml, pci, sysfs
from anyrig.hardware.device_node import DeviceNode, Probe


@dataclass(frozen=True)
class NvidiaGpu:
    """One GPU as the driver lists it."""

    index: int | None
    """Number among the openable devices in bus order (``CUDA_DEVICE_ORDER=PCI_BUS_ID``); ``None`` if not openable."""
    name: str
    bus: str
    uuid: str | None
    node: DeviceNode
    """``/dev/nvidia<minor>``."""
    memory: int | None
    """Bytes, or ``None`` where NVML did not tell."""
    capability: str | None
    """Compute capability, for example ``9.0``, or ``None``."""


@dataclass(frozen=True)
class Nvidia:
    """Everything NVIDIA in the machine."""

    gpus: tuple[NvidiaGpu, ...]
    driver: str | None
    control: DeviceNode
    """``/dev/nvidiactl``, which every program opens first."""
    unified: DeviceNode
    """``/dev/nvidia-uvm``, without which CUDA does not start."""
    pci_cards: tuple[pci.PciCard, ...]

    @property
    def usable(self) -> tuple[NvidiaGpu, ...]:
        """The GPUs that a program started here can open."""
        return tuple(gpu for gpu in self.gpus if gpu.index is not None)


#: Asks the driver about its devices, by PCI address; replaced in tests, where no driver answers for the tree.
AskDriver = Callable[[], dict[str, nvml.Answer]]


def read(root: Path = Path("/"), probe: Probe = device_node.probe, ask: AskDriver | None = None) -> Nvidia:
    """Find NVIDIA GPUs below ``root``; unless ``ask`` is given, NVML is only asked where ``root`` is ``/``."""
    control, unified = probe("/dev/nvidiactl", root), probe("/dev/nvidia-uvm", root)
    folders = sysfs.entries(sysfs.below(root, "/proc/driver/nvidia/gpus"))
    if ask is None:
        ask = nvml.read if root == Path("/") else dict
    # WSL has no such files but its library answers; elsewhere nobody is asked when the driver is not there.
    answers = ask() if folders or sysfs.below(root, "/dev/dxg").exists() else {}
    gpus: list[NvidiaGpu] = []
    for folder in folders:
        facts = sysfs.table(folder / "information", ":")
        bus = (facts.get("Bus Location") or folder.name).lower()
        answer = answers.get(bus)
        node = probe(f"/dev/nvidia{facts.get('Device Minor', '?')}", root)
        excluded = facts.get("GPU Excluded", "No") == "Yes"
        openable = control.state == unified.state == node.state == "ok" and not excluded
        gpus.append(
            NvidiaGpu(
                index=sum(gpu.index is not None for gpu in gpus) if openable else None,
                name=facts.get("Model") or (answer.name if answer else "NVIDIA GPU"),
                bus=bus,
                uuid=facts.get("GPU UUID"),
                node=node,
                memory=answer.memory if answer else None,
                capability=answer.capability if answer else None,
            )
        )
    if not folders:
        wsl = DeviceNode("/dev/dxg", "ok")
        for index, (bus, answer) in enumerate(sorted(answers.items())):
            gpus.append(NvidiaGpu(index, answer.name, bus, None, wsl, answer.memory, answer.capability))
    return Nvidia(tuple(gpus), driver_version(root), control, unified, tuple(pci.cards(pci.NVIDIA, root)))


def driver_version(root: Path = Path("/")) -> str | None:
    """The kernel driver's version: the first number with a dot in the ``NVRM version`` line."""
    line = (sysfs.text(sysfs.below(root, "/proc/driver/nvidia/version")) or "").partition("\n")[0]
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", line)
    return found.group() if found else None
