"""The diagnosis: facts in, findings and a verdict out. Pure, so that any machine can be judged from a tree of files."""

from typing import Any

from anyrig.hardware import gpu_findings, machine_findings, torch_findings
from anyrig.hardware.amd import AmdGpu
from anyrig.hardware.facts import Facts
from anyrig.hardware.finding import Finding, size
from anyrig.hardware.nvidia import NvidiaGpu

# Share of the memory that weights may take, so that KV pages, activations and the rest still fit.
_WEIGHTS_SHARE = 0.7
_BF16_BYTES = 2


def diagnose(facts: Facts) -> list[Finding]:
    """Judge the facts; findings in reading order, each with its remedy where it is not ok."""
    return [*machine_findings.findings(facts), *gpu_findings.findings(facts), *torch_findings.findings(facts)]


def ready(facts: Facts) -> list[AmdGpu] | list[NvidiaGpu]:
    """The GPUs that the installed torch can use as things stand: openable, not masked, of the build's vendor."""
    state = gpu_findings.masks_of(facts)
    if facts.torch is None or state is None:
        return []
    if facts.torch.kind == "rocm" and facts.amd.gpus:
        built = facts.torch.targets
        amd = [gpu for place, gpu in enumerate(facts.amd.usable) if place in state.visible]
        return [gpu for gpu in amd if not built or gpu.gfx in built]
    if facts.torch.kind == "cuda":
        return [gpu for place, gpu in enumerate(facts.nvidia.usable) if place in state.visible]
    return []


def verdict(facts: Facts, findings: list[Finding]) -> str:
    """One line: what this machine can do with anyrig as it stands."""
    count = sum(finding.state == "problem" for finding in findings)
    problems = (
        f" {count} problem{'s' if count > 1 else ''} found: see the remed{'ies' if count > 1 else 'y'}."
        if count
        else ""
    )
    if facts.torch is None:
        return f"anyrig cannot run here yet: torch is missing.{problems}"
    devices = ready(facts)
    if devices:
        names = f"{len(devices)} × {devices[0].name}" if len(devices) > 1 else devices[0].name
        memory = devices[0].memory
        each = f" with {size(memory)}{' each' if len(devices) > 1 else ''}" if memory else ""
        per = " per device" if len(devices) > 1 else ""
        fits = f": models up to about {_parameters(memory)} parameters in bf16{per}" if memory else ""
        return f"anyrig can run on {names}{each}{fits}.{problems}"
    cpu = facts.cpu
    # An office PC's GPU, for which nobody builds kernels, is not waiting for anything.
    waiting = bool(facts.nvidia.gpus) or any(gpu.target is not None for gpu in facts.amd.gpus)
    idle = " (the GPU is not usable as things stand)" if waiting else ""
    return (
        f"anyrig can run on the CPU{idle}: {cpu.cores} core{'s' if cpu.cores > 1 else ''}, models up to about "
        f"{_parameters(cpu.memory_available)} parameters in bf16.{problems}"
    )


def _parameters(memory: int) -> str:
    count = memory * _WEIGHTS_SHARE / _BF16_BYTES
    return f"{count / 1e9:.0f} billion" if count >= 1e9 else f"{count / 1e6:.0f} million"


def as_json(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    """The report for programs. Keys are stable; memory in bytes."""
    cpu, build = facts.cpu, facts.torch
    return {
        "ok": not any(finding.state == "problem" for finding in findings),
        "verdict": verdict(facts, findings),
        "cpu": {
            "model": cpu.model,
            "architecture": cpu.architecture,
            "cores": cpu.cores,
            "physical_cores": cpu.physical_cores,
            "machine_cores": cpu.machine_cores,
            "quota": cpu.quota,
            "instruction_sets": cpu.instruction_sets,
            "native_bf16": cpu.native_bf16,
            "native_int8": cpu.native_int8,
            "memory_total": cpu.memory_total,
            "memory_limit": cpu.memory_limit,
            "memory_available": cpu.memory_available,
        },
        "devices": [*map(_amd_json, facts.amd.gpus), *map(_nvidia_json, facts.nvidia.gpus)],
        "torch": None
        if build is None
        else {
            "version": build.version,
            "kind": build.kind,
            "toolkit": build.toolkit,
            "path": str(build.path),
            "targets": list(build.targets),
        },
        "kernels": None
        if facts.kernels is None
        else {"built": list(facts.kernels.built), "used": facts.kernels.used, "reason": facts.kernels.reason},
        "software": {
            "python": ".".join(map(str, facts.python)),
            "compilers": dict(facts.compilers),
            "packages": dict(facts.packages),
            "container": facts.container,
        },
        "findings": [finding.as_json() for finding in findings],
    }


def _amd_json(gpu: AmdGpu) -> dict[str, Any]:
    return {
        "vendor": "amd",
        "index": gpu.index,
        "name": gpu.name,
        "arch": gpu.gfx,
        "bus": gpu.bus,
        "uuid": gpu.uuid,
        "memory": gpu.memory,
        "usable": gpu.index is not None,
        "node": gpu.render.as_json(),
        "compute_units": gpu.units,
        "wave": gpu.wave,
        "partition": gpu.partition,
        "partitions": gpu.partitions,
        "apu": gpu.apu,
        "fp8": gpu.target.fp8 if gpu.target else None,
        "supported": gpu.target is not None,
    }


def _nvidia_json(gpu: NvidiaGpu) -> dict[str, Any]:
    return {
        "vendor": "nvidia",
        "index": gpu.index,
        "name": gpu.name,
        "arch": f"sm_{gpu.capability.replace('.', '')}" if gpu.capability else None,
        "bus": gpu.bus,
        "uuid": gpu.uuid,
        "memory": gpu.memory,
        "usable": gpu.index is not None,
        "node": gpu.node.as_json(),
    }
