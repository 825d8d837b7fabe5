"""A device file such as ``/dev/kfd``: is it there, may this user open it, and which group would let them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anyrig.hardware import sysfs


@dataclass(frozen=True)
class DeviceNode:
    """State of one device file."""

    path: str
    state: Literal["ok", "missing", "denied"]
    gid: int | None = None
    group: str | None = None
    """The name of ``gid`` here; ``None`` also where the number has no name, as often inside a container."""

    def as_json(self) -> dict[str, str | int | None]:
        return {"path": self.path, "state": self.state, "gid": self.gid, "group": self.group}


#: Looks at one device file of the machine below a root; tests bring their own, since root may open everything.
Probe = Callable[[str, Path], DeviceNode]


def probe(path: str, root: Path = Path("/")) -> DeviceNode:
    """Ask the kernel whether this process may read and write the device file, without opening it."""
    file = sysfs.below(root, path)
    try:
        gid = file.stat().st_gid
    except PermissionError:
        return DeviceNode(path, "denied")
    except OSError:
        return DeviceNode(path, "missing")
    state: Literal["ok", "denied"] = "ok" if os.access(file, os.R_OK | os.W_OK) else "denied"
    return DeviceNode(path, state, gid, group_name(gid, root))


#: Device files without which no driver of AMD, NVIDIA or WSL offers a GPU.
GPU_NODES = ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg")


def gpu_nodes(root: Path = Path("/")) -> list[str]:
    """Those of `GPU_NODES` that are here: with none of them there is no need to ask torch for a GPU."""
    return [path for path in GPU_NODES if sysfs.below(root, path).exists()]


def group_name(gid: int, root: Path = Path("/")) -> str | None:
    """The group's name in ``/etc/group`` below ``root``."""
    for line in (sysfs.text(sysfs.below(root, "/etc/group")) or "").splitlines():
        name, _, rest = line.partition(":")
        if rest.split(":")[1:2] == [str(gid)]:
            return name
    return None


def in_container(root: Path = Path("/")) -> bool:
    """Whether this looks like the inside of a container (Docker's or Podman's marker files)."""
    return any(sysfs.below(root, path).exists() for path in ("/.dockerenv", "/run/.containerenv"))
