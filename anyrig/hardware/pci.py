"""Graphics and accelerator cards on the PCI bus, whether or not a driver serves them."""

from dataclasses import dataclass
from pathlib import Path

from anyrig.hardware import sysfs

AMD = 0x1002
NVIDIA = 0x10DE

# VGA, 3D and other display controllers, processing accelerators (Instinct); not a card's audio function.
_CLASSES = (0x0300, 0x0302, 0x0380, 0x1200)


@dataclass(frozen=True)
class PciCard:
    """One PCI function: ``bus`` as ``domain:bus:device.function``, and the kernel driver bound to it, if any."""

    bus: str
    vendor: int
    device_id: int
    driver: str | None


def cards(vendor: int, root: Path = Path("/")) -> list[PciCard]:
    """The vendor's cards in bus order."""
    found = []
    for folder in sysfs.entries(sysfs.below(root, "/sys/bus/pci/devices")):
        kind = sysfs.integer(folder / "class") or 0
        if sysfs.integer(folder / "vendor") == vendor and kind >> 8 in _CLASSES:
            driver = folder / "driver"
            name = driver.resolve().name if driver.exists() else None
            found.append(PciCard(folder.name, vendor, sysfs.integer(folder / "device") or 0, name))
    return found
