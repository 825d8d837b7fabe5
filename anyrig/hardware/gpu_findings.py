"""Findings about GPUs as such: driver, device files, targets, partitions, APU memory, masks."""

from collections import Counter
from collections.abc import Iterator

from anyrig.hardware import masks
from anyrig.hardware.amd import AmdGpu
from anyrig.hardware.device_node import DeviceNode
from anyrig.hardware.facts import Facts
from anyrig.hardware.finding import Finding, ok, problem, size, warning

# Reported faults with a foreign target forced on these (legacy-rocm-build#5824; INVALID_ISA on gfx1150).
_OVERRIDE_CRASHES = ("gfx1150", "gfx1151")
# A carve-out of 512 MiB to 2 GiB is firmware's default; above, memory lies idle.
_CARVE_OUT_DEFAULT = 2 * 2**30


def findings(facts: Facts) -> Iterator[Finding]:
    """All findings of this file, in reading order; none on a machine without GPUs."""
    yield from _amd_driver(facts)
    yield from _amd_access(facts)
    yield from _amd_targets(facts)
    yield from _amd_memory(facts)
    yield from _override(facts)
    yield from _nvidia(facts)
    yield from _masks(facts)


def join_group(node: DeviceNode, container: bool, devices: str) -> str:
    """How to get at a device file that belongs to a group, in a container and on the host."""
    name = node.group or (f"the group with number {node.gid}" if node.gid is not None else "its group")
    number = node.gid if node.gid is not None else f"$(stat -c %g {node.path})"
    docker = f"docker run {devices} --group-add {number} ..."
    if container:
        return f"Start the container with {docker} (the number, since names differ between host and image)."
    if node.gid == 0:
        return f"The file belongs to root alone: reload udev's rules (sudo udevadm trigger) or reboot. Docker: {docker}"
    return f"sudo usermod -aG {name} $USER, then log in again (gid {number}). Docker: {docker}"


def _amd_driver(facts: Facts) -> Iterator[Finding]:
    amd = facts.amd
    if amd.gpus or not amd.pci_cards:
        return
    cards = ", ".join(f"0x{card.device_id:04x} at {card.bus}" for card in amd.pci_cards)
    drivers = {card.driver for card in amd.pci_cards} - {None}
    if amd.hidden_nodes:
        yield problem(
            "amd driver",
            f"The kernel lists AMD GPUs ({cards}), but this container's device rules hide all of them.",
            "Start the container with --device /dev/kfd --device /dev/dri.",
        )
    elif "vfio-pci" in drivers:
        yield warning(
            "amd driver",
            f"An AMD GPU ({cards}) is reserved for a virtual machine (vfio-pci).",
            "Give it back to the amdgpu driver to use it here.",
        )
    else:
        yield problem(
            "amd driver",
            f"There is an AMD GPU ({cards}), but the kernel offers no compute device for it"
            + (" (driver amdgpu is loaded)." if amd.driver_loaded else " (driver amdgpu is not loaded)."),
            "Run sudo modprobe amdgpu and look at dmesg | grep -iE 'amdgpu|kfd'; the card may need a newer kernel or "
            "linux-firmware.",
        )


def _amd_access(facts: Facts) -> Iterator[Finding]:
    amd = facts.amd
    if not amd.gpus:
        return
    kfd, closed = amd.kfd, [gpu for gpu in amd.gpus if gpu.render.state != "ok"]
    flags = "--device /dev/kfd --device /dev/dri"
    if kfd.state == "missing":
        remedy = f"Start the container with {flags}." if facts.container else "Run sudo modprobe amdgpu."
        yield problem("kfd", "/dev/kfd is missing: no program here can compute on the AMD GPU.", remedy)
    elif kfd.state == "denied":
        owner = f"group {kfd.group or 'without a name here'}, gid {kfd.gid}" if kfd.gid is not None else "another user"
        sentence = f"/dev/kfd may not be opened by this user ({owner}): no program here can compute on the AMD GPU."
        yield problem("kfd", sentence, join_group(kfd, facts.container, flags))
    if closed:
        names = _series([gpu.render.path for gpu in closed])
        missing = all(gpu.render.state == "missing" for gpu in closed)
        sentence = f"{len(closed)} of {len(amd.gpus)} render nodes {'are missing' if missing else 'may not be opened'}"
        remedy = join_group(closed[0].render, facts.container, flags)
        if kfd.state == "denied" and kfd.gid == closed[0].render.gid:
            remedy = "The same as for kfd."
        if missing:
            remedy = f"Start the container with {flags}." if facts.container else "Run sudo modprobe amdgpu."
        # A container that was given some of the GPUs is as it should be.
        if missing and facts.container and amd.usable:
            yield ok("render nodes", f"{sentence} ({names}): the container was given the other GPUs.")
        else:
            yield problem("render nodes", f"{sentence} ({names}).", remedy)
    if amd.usable and kfd.state == "ok":
        chips = len({gpu.unique_id or gpu.node for gpu in amd.usable})
        parts = f", partitions of {chips} chip{'s' if chips > 1 else ''}" if chips < len(amd.usable) else ""
        hidden = f" ({amd.hidden_nodes} more are hidden from this container)" if amd.hidden_nodes else ""
        yield ok("amd devices", f"{len(amd.usable)} can be opened{parts}{hidden}.")


def _series(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]}"


def _amd_targets(facts: Facts) -> Iterator[Finding]:
    for gfx, count in Counter(gpu.gfx for gpu in facts.amd.gpus).items():
        gpu = next(gpu for gpu in facts.amd.gpus if gpu.gfx == gfx)
        many = f"{count} × " if count > 1 else ""
        if gfx is None:
            yield warning(
                "amd target",
                f"The kernel is too old to name the target of {many}{gpu.name}, and its id is not in our table.",
                "Use Linux 5.16 or newer; cards of the Vega generation and before are not supported by current ROCm.",
            )
        elif gpu.target is None:
            yield warning(
                "amd target",
                f"{many}{gpu.name} is {gfx}, which is not among the targets anyrig is made for.",
                "It may run where torch's build has kernels for it: try anyrig doctor --deep. Otherwise use the CPU.",
            )
        elif gpu.gfx_from_table:
            yield warning(
                "amd target",
                f"The kernel is too old to name the target of {many}{gpu.name}; by its PCI id it is {gfx}.",
                "Use Linux 5.16 or newer: current ROCm needs the kernel to name it.",
            )
        else:
            fp8 = {"none": "no fp8", "fnuz": "fp8 FNUZ", "ocp": "fp8 OCP"}[gpu.target.fp8]
            yield ok("amd target", f"{many}{gpu.name}: {gfx}, wave {gpu.wave}, {fp8}.")
    if len({gpu.gfx for gpu in facts.amd.usable}) > 1:
        yield warning(
            "mixed targets",
            "GPUs of different targets: HIP numbers those of one target together, so HIP_VISIBLE_DEVICES need not "
            "follow the order shown here.",
            "Check with anyrig doctor --deep which GPU a number means.",
        )


def _amd_memory(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.amd.gpus:
        if not gpu.apu:
            continue
        if gpu.carve_out > _CARVE_OUT_DEFAULT:
            yield warning(
                "apu memory",
                f"Firmware set {size(gpu.carve_out)} aside for {gpu.name}; ROCm cannot use that and may take only "
                f"{size(gpu.memory)} of the memory that is left.",
                "Set the carve-out (UMA frame buffer) to its least in the firmware's menu, and boot with "
                "ttm.pages_limit=<memory in 4 KiB pages> for more.",
            )
        elif gpu.memory > facts.cpu.memory_total > 0:
            yield warning(
                "apu memory",
                f"{gpu.name} is allowed {size(gpu.memory)} of shared memory, but there are only "
                f"{size(facts.cpu.memory_total)}: the kernel would kill a program that took it all.",
                "Lower ttm.pages_limit, or the firmware's carve-out.",
            )
        else:
            limit = f" (limit of the driver: {size(facts.shared_limit)})" if facts.shared_limit else ""
            yield ok("apu memory", f"{gpu.name} shares the system's memory and may take {size(gpu.memory)}{limit}.")


def _override(facts: Facts) -> Iterator[Finding]:
    wish = facts.environment.get("HSA_OVERRIDE_GFX_VERSION")
    if not wish or not facts.amd.gpus:
        return
    native: list[AmdGpu] = [gpu for gpu in facts.amd.gpus if gpu.target is not None]
    if native:
        gpu = native[0]
        harm = "is known to crash there" if gpu.gfx in _OVERRIDE_CRASHES else "makes it run another target's code"
        yield warning(
            "gfx override",
            f"HSA_OVERRIDE_GFX_VERSION={wish} is set, but {gpu.name} is {gpu.gfx}, a target that needs no override; it "
            f"{harm}.",
            "Unset HSA_OVERRIDE_GFX_VERSION.",
        )
    else:
        names = ", ".join(sorted({gpu.gfx or "an unknown target" for gpu in facts.amd.gpus}))
        yield ok("gfx override", f"HSA_OVERRIDE_GFX_VERSION={wish} lets {names} run another target's code.")


def _nvidia(facts: Facts) -> Iterator[Finding]:
    nvidia = facts.nvidia
    if not nvidia.gpus:
        if nvidia.pci_cards and not any(card.driver == "vfio-pci" for card in nvidia.pci_cards):
            remedy = "Install NVIDIA's driver; nouveau cannot compute."
            if facts.container:
                remedy = "Start the container with --gpus all (NVIDIA container toolkit)."
            yield problem(
                "nvidia driver", "There is an NVIDIA GPU, but its driver is not loaded or not visible.", remedy
            )
        return
    missing = [node for node in (nvidia.control, nvidia.unified) if node.state == "missing"]
    missing += [gpu.node for gpu in nvidia.gpus if gpu.node.state == "missing"]
    denied = [node for node in (nvidia.control, nvidia.unified) if node.state == "denied"]
    denied += [gpu.node for gpu in nvidia.gpus if gpu.node.state == "denied"]
    if denied:
        remedy = join_group(denied[0], facts.container, "--gpus all")
        yield problem(
            "nvidia devices", f"{_series([node.path for node in denied])} may not be opened by this user.", remedy
        )
    if missing and facts.container and nvidia.usable:
        yield ok("nvidia devices", f"{len(nvidia.usable)} of {len(nvidia.gpus)} GPUs were given to this container.")
    elif missing:
        remedy = "Run sudo nvidia-modprobe -u -c=0 to make the device files."
        if facts.container:
            remedy = "Start the container with --gpus all (NVIDIA container toolkit)."
        yield problem("nvidia devices", f"{_series([node.path for node in missing])} missing.", remedy)
    elif not denied:
        yield ok(
            "nvidia devices", f"{len(nvidia.usable)} can be opened, driver {nvidia.driver or 'of unknown version'}."
        )


def _masks(facts: Facts) -> Iterator[Finding]:
    state = masks_of(facts)
    if state is None or not state.values:
        return
    for conflict in state.conflicts:
        yield (problem if conflict.fatal else warning)(conflict.name, conflict.sentence, conflict.remedy)
    if not state.conflicts:
        values = ", ".join(f"{name}={value}" for name, value in state.values.items())
        yield ok("device masks", f"{values} leaves GPU {', '.join(map(str, state.visible))} visible.")


def masks_of(facts: Facts) -> masks.Masks | None:
    """The masks as applied to the GPUs that torch's build would use, else to those there are; ``None`` without any."""
    build = facts.torch.kind if facts.torch else None
    if facts.amd.gpus and (build != "cuda" or not facts.nvidia.gpus):
        return masks.amd(facts.environment, [gpu.uuid for gpu in facts.amd.usable])
    if facts.nvidia.gpus:
        return masks.nvidia(facts.environment, [gpu.uuid for gpu in facts.nvidia.usable])
    return None
