"""What the device-mask variables leave visible, and where they contradict each other.

Rules, read in the sources of Ray (``_private/accelerators/amd_gpu.py``), vLLM (``platforms/rocm.py``) and verl
(``single_controller/base/worker.py``):
- HIP honours HIP_VISIBLE_DEVICES, and CUDA_VISIBLE_DEVICES where that is unset; Ray and vLLM refuse unequal values.
- ROCR_VISIBLE_DEVICES works one level lower: HIP's numbers count within what ROCR left. Ray from 2.45 refuses ROCR
  alone, verl refuses it beside either of the others.
- Numbering ends at the first entry that names no device; an empty value hides all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAMES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

# What Ray and schedulers write for "no device".
_NOTHING = ("", "NoDevFiles", "-1")


@dataclass(frozen=True)
class Conflict:
    """One thing wrong with the masks. ``fatal``: programs stop, or see other devices than was meant."""

    name: str
    fatal: bool
    sentence: str
    remedy: str


@dataclass(frozen=True)
class Masks:
    """The variables that are set, the devices (by their unmasked number) that stay visible, and what is wrong."""

    values: dict[str, str]
    visible: tuple[int, ...]
    conflicts: tuple[Conflict, ...]


def _select(value: str, uuids: Sequence[str | None]) -> tuple[list[int], str | None]:
    """Positions in ``uuids`` that a mask keeps, and its first entry that names no device."""
    if value.strip() in _NOTHING:
        return [], None
    kept: list[int] = []
    for entry in (part.strip() for part in value.split(",")):
        if entry.isdigit() and int(entry) < len(uuids):
            kept.append(int(entry))
        elif entry.startswith("GPU-") and (
            places := [i for i, uuid in enumerate(uuids) if uuid and uuid.lower().startswith(entry.lower())]
        ):
            kept += places
        else:
            return kept, entry
    return kept, None


def amd(env: Mapping[str, str], uuids: Sequence[str | None]) -> Masks:
    """Apply the masks to AMD devices.

    Args:
        env: the environment.
        uuids: one entry per openable device in kfd's order: its ``GPU-...`` name or ``None``.
    """
    values = {name: env[name] for name in NAMES if name in env}
    conflicts = []
    rocr, hip, cuda = (values.get(name) for name in NAMES)
    if hip is not None and cuda is not None and hip != cuda:
        conflicts.append(
            Conflict(
                "HIP and CUDA masks",
                True,
                f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} differ: Ray and vLLM refuse to start.",
                "Unset CUDA_VISIBLE_DEVICES and keep HIP_VISIBLE_DEVICES.",
            )
        )
    upper_name = "HIP_VISIBLE_DEVICES" if hip is not None else "CUDA_VISIBLE_DEVICES"
    upper = hip if hip is not None else cuda
    visible = list(range(len(uuids)))
    if rocr is not None:
        visible, wrong = _select(rocr, uuids)
        conflicts += _unknown("ROCR_VISIBLE_DEVICES", wrong, len(uuids), "openable")
    if upper is not None:
        inner = [uuids[place] for place in visible]
        kept, wrong = _select(upper, inner)
        # Beside ROCR the next conflict says it better.
        conflicts += _unknown(upper_name, wrong, len(inner), "openable") if rocr is None else []
        visible = [visible[place] for place in kept]
    if rocr is not None and upper is not None:
        left = f"GPU {', '.join(map(str, visible))}" if visible else "no GPU at all"
        conflicts.append(
            Conflict(
                "ROCR and HIP masks",
                True,
                f"ROCR_VISIBLE_DEVICES={rocr} and {upper_name}={upper} are both set: the second counts within "
                f"what the first left, which makes {left}; verl refuses to start.",
                f"Unset ROCR_VISIBLE_DEVICES and name the devices in {upper_name} alone.",
            )
        )
    elif rocr is not None:
        conflicts.append(
            Conflict(
                "ROCR mask",
                False,
                f"ROCR_VISIBLE_DEVICES={rocr} is set without HIP_VISIBLE_DEVICES: Ray 2.45 and newer refuse to start.",
                "Put the same devices into HIP_VISIBLE_DEVICES and unset ROCR_VISIBLE_DEVICES.",
            )
        )
    return Masks(values, tuple(visible), (*conflicts, *_all_hidden(values, uuids, visible, conflicts)))


def nvidia(env: Mapping[str, str], uuids: Sequence[str | None]) -> Masks:
    """Apply CUDA_VISIBLE_DEVICES to NVIDIA devices; the AMD variables do nothing there, but verl stops at them.

    ``uuids``: one entry per openable device in bus order, as ``nvidia-smi -L`` names it, or ``None``.
    """
    values = {name: env[name] for name in NAMES if name in env}
    visible, conflicts = list(range(len(uuids))), []
    cuda = values.get("CUDA_VISIBLE_DEVICES")
    # A MIG slice is no entry of the driver's list of GPUs: take the user's word for it.
    if cuda is not None and not cuda.startswith("MIG-"):
        visible, wrong = _select(cuda, uuids)
        conflicts += _unknown("CUDA_VISIBLE_DEVICES", wrong, len(uuids), "openable")
    if cuda is not None and "ROCR_VISIBLE_DEVICES" in values:
        conflicts.append(
            Conflict(
                "ROCR mask",
                False,
                "ROCR_VISIBLE_DEVICES is set beside CUDA_VISIBLE_DEVICES on a machine without an AMD GPU (Slurm does "
                "that): verl refuses to start.",
                "Unset ROCR_VISIBLE_DEVICES in the job script.",
            )
        )
    return Masks(values, tuple(visible), (*conflicts, *_all_hidden(values, uuids, visible, conflicts)))


def _unknown(name: str, entry: str | None, devices: int, kind: str) -> list[Conflict]:
    if entry is None:
        return []
    there = f"only GPU 0 to {devices - 1} are {kind}" if devices > 1 else "only GPU 0 is" if devices else "none is"
    there = there if devices > 1 else f"{there} {kind}"
    return [
        Conflict(
            name,
            True,
            f"{name} names device {entry!r}, but {there}; that entry and all after it are dropped.",
            f"Correct {name}, or unset it to see every device.",
        )
    ]


def _all_hidden(
    values: dict[str, str], uuids: Sequence[str | None], visible: list[int], conflicts: list[Conflict]
) -> list[Conflict]:
    if visible or not uuids or any(conflict.fatal for conflict in conflicts):
        return []
    hiding = ", ".join(f"{name}={value!r}" for name, value in values.items() if value.strip() in _NOTHING)
    sentence = f"{hiding} hides every GPU; programs run on the CPU."
    return [Conflict("empty mask", False, sentence, "Unset it, unless that is meant.")]
