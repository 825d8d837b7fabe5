"""Findings about torch: does the installed build fit the devices here, and (``--deep``) what does it really see."""

from collections.abc import Iterator

from anyrig.hardware import gpu_findings
from anyrig.hardware.facts import Facts
from anyrig.hardware.finding import Finding, ok, problem, warning
from anyrig.hardware.torch_build import Deep, TorchBuild

_OLDEST = (2, 6)
_ROCM_WHEELS = (
    "Install torch from the index of your ROCm version (names: https://pytorch.org/get-started/locally): "
    "TORCH_INDEX_URL=https://download.pytorch.org/whl/rocmX.Y make setup."
)
_CUDA_WHEELS = (
    "Install torch from the index of your CUDA version (names: https://pytorch.org/get-started/locally): "
    "TORCH_INDEX_URL=https://download.pytorch.org/whl/cuXYZ make setup."
)


def findings(facts: Facts) -> Iterator[Finding]:
    """All findings of this file, in reading order."""
    build = facts.torch
    if build is None:
        yield problem("torch", "torch is not installed in this Python.", "Run make setup.")
        return
    if build.release < _OLDEST:
        yield problem("torch", f"torch {build.label} is too old.", "Install torch 2.6 or newer.")
    yield _fit(facts, build)
    if build.kind == "rocm":
        yield from _rocm(facts, build)
    if facts.deep is not None:
        yield from _deep(facts, build, facts.deep)


def _fit(facts: Facts, build: TorchBuild) -> Finding:
    """Build against devices. A GPU of a target nobody has kernels for (an office PC's) is no reason to complain."""
    amd = [gpu for gpu in facts.amd.gpus if gpu.target is not None]
    nvidia = facts.nvidia.gpus
    fits = {"rocm": bool(facts.amd.gpus), "cuda": bool(nvidia)}.get(build.kind, False)
    if fits:
        return ok("torch build", f"torch {build.label} fits the GPUs of this machine.")
    if amd or nvidia:
        device, remedy = (amd[0].name, _ROCM_WHEELS) if amd else (nvidia[0].name, _CUDA_WHEELS)
        sentence = f"torch {build.label} cannot use the {device} of this machine: everything would run on the CPU."
        if build.kind == "cuda":
            sentence += " Wheels for CUDA often come in as a dependency of another package."
        return problem("torch build", sentence, remedy)
    if build.kind == "cpu":
        return ok("torch build", f"torch {build.label} is the right build for a machine without a supported GPU.")
    return ok("torch build", f"torch {build.label} finds no such GPU here and runs on the CPU.")


def _rocm(facts: Facts, build: TorchBuild) -> Iterator[Finding]:
    targets = {gpu.gfx: gpu for gpu in facts.amd.gpus if gpu.gfx}
    overridden = "HSA_OVERRIDE_GFX_VERSION" in facts.environment
    for gfx, gpu in targets.items():
        if build.targets and gfx not in build.targets and not overridden:
            yield problem(
                "torch kernels",
                f"This torch has no matrix kernels for {gfx} ({gpu.name}), only for {', '.join(build.targets)}.",
                "Install a torch built with a newer ROCm, or use the CPU.",
            )
        target = gpu.target
        if target is None:
            continue
        # HIP's patch number does not tell ROCm's, so only major and minor are compared.
        needed = tuple(int(part) for part in (target.min_rocm or "0.0").split(".")[:2])
        if build.toolkit_release and build.toolkit_release < needed:
            yield problem(
                "rocm version",
                f"torch {build.label} is older than ROCm {target.min_rocm}, the first that knows {gfx}.",
                _ROCM_WHEELS,
            )
        through = tuple(int(part) for part in (target.sdpa_experimental_through or "0.0").split("."))
        enabled = facts.environment.get("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL") == "1"
        if (target.sdpa == "experimental" or build.release <= through) and not enabled:
            yield warning(
                "attention",
                f"torch {build.label} switches its fast attention off on {gfx}, where it counts as experimental; "
                "prompts then need memory quadratic in their length.",
                "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1",
            )
    nvml = [name for name in ("pynvml", "nvidia-ml-py") if name in facts.packages]
    if nvml:
        yield warning(
            "pynvml",
            f"{' and '.join(nvml)} beside a ROCm torch makes torch.cuda's queries of use and temperature fail with a "
            "NameError (pytorch#133259).",
            f"pip uninstall {' '.join(nvml)}",
        )


def _deep(facts: Facts, build: TorchBuild, deep: Deep) -> Iterator[Finding]:
    if deep.error is not None:
        yield problem("torch import", f"{deep.error}.", "Reinstall torch (make setup), or see the message above.")
        return
    if deep.version != build.version:
        yield problem(
            "torch import",
            f"import torch gives {deep.version}, but the files found here are {build.version}: two installations.",
            "Uninstall torch until pip finds none, then install it once.",
        )
    else:
        yield ok(
            "torch import", f"import torch works and takes {deep.seconds:.1f} s; CPU kernels {deep.cpu_capability}."
        )
    if deep.threads > facts.cpu.cores:
        yield warning(
            "torch threads",
            f"torch starts {deep.threads} threads by itself, but {facts.cpu.cores} cores are usable.",
            f"anyrig sets this itself; for other programs export OMP_NUM_THREADS={facts.cpu.cores}.",
        )
    state = gpu_findings.masks_of(facts)
    vendor = {"rocm": facts.amd.usable, "cuda": facts.nvidia.usable}.get(build.kind, ())
    expected = len(state.visible) if state is not None and vendor else 0
    if len(deep.devices) != expected:
        yield problem(
            "torch devices",
            f"torch sees {len(deep.devices)} GPU{'s' if len(deep.devices) != 1 else ''} where the kernel's files and "
            f"the masks let expect {expected}.",
            "Look at the findings above; if all are ok, the driver and torch's runtime do not match (newer container "
            "than host driver).",
        )
    for index, device in enumerate(deep.devices):
        if device.error:
            yield problem(
                f"torch device {index}",
                f"{device.name or device.arch} fails at a small matrix product: {device.error}.",
                f"torch was built for {', '.join(deep.arch_list) or 'unknown targets'}; the device is {device.arch}.",
            )
        else:
            yield ok(f"torch device {index}", f"{device.name or 'unnamed'} ({device.arch}) computes correctly.")
