"""Findings about the machine without its GPUs: cores, memory, instruction sets, compiler, Python, disk."""

from collections.abc import Iterator

from anyrig.hardware.facts import Facts
from anyrig.hardware.finding import Finding, ok, problem, size, warning

# SmolLM2-135M with its KV pages, Python and torch runs in 1.5 GiB; below that not even the demo does.
_LEAST_MEMORY = 3 * 2**29
# Torch's CPU wheel, a small model and its prepared copy.
_LEAST_DISK = 2 * 2**30
_ROOMY_DISK = 10 * 2**30
# Docker gives 64 MiB, in which Ray's object store spills and torch's workers die of SIGBUS.
_LEAST_SHARED = 2**30


def findings(facts: Facts) -> Iterator[Finding]:
    """All findings of this file, in reading order."""
    yield from _cores(facts)
    yield from _memory(facts)
    yield from _instruction_sets(facts)
    yield from _compiler(facts)
    yield from _kernels(facts)
    yield from _python(facts)
    yield from _disk(facts)


def _cores(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    if cpu.quota is not None and cpu.quota < cpu.allowed_cores:
        yield warning(
            "cores",
            f"The control group grants {cpu.quota:g} of {cpu.machine_cores} cores; anyrig starts {cpu.cores} "
            "threads, but other programs may start one per core and stall.",
            f"Raise the limit (docker --cpus, Kubernetes limits.cpu), or export OMP_NUM_THREADS={cpu.cores} for them.",
        )
    elif cpu.allowed_cores < cpu.machine_cores:
        yield warning(
            "cores",
            f"This process may run on {cpu.allowed_cores} of {cpu.machine_cores} cores (affinity or cpuset).",
            "Start it without taskset, or raise --cpuset-cpus or the scheduler's CPUs per task.",
        )
    else:
        yield ok("cores", f"All {cpu.cores} cores are usable.")
    wish = facts.environment.get("OMP_NUM_THREADS", "")
    if wish.isdigit() and int(wish) > cpu.cores:
        yield warning(
            "threads",
            f"OMP_NUM_THREADS={wish}, but {cpu.cores} cores are usable: threads will wait for each other.",
            f"Unset it or export OMP_NUM_THREADS={cpu.cores}.",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    room = f"{size(cpu.memory_available)} of {size(cpu.memory_total)} memory are available"
    if cpu.memory_available < _LEAST_MEMORY:
        yield problem(
            "memory",
            f"Only {room}; the smallest model needs about {size(_LEAST_MEMORY)}.",
            "Close other programs, or raise the container's memory limit.",
        )
    elif cpu.memory_limit < cpu.memory_total:
        yield warning(
            "memory",
            f"{room}: the control group ends at {size(cpu.memory_limit)}, and the kernel kills what goes beyond.",
            "Raise the limit (docker --memory, Kubernetes limits.memory) if models do not fit.",
        )
    else:
        yield ok("memory", f"{room}.")
    if facts.shared_memory is not None and facts.shared_memory < _LEAST_SHARED:
        yield warning(
            "shared memory",
            f"/dev/shm holds {size(facts.shared_memory)}; Ray and torch's workers pass tensors through it.",
            "Start the container with --shm-size=8g (or --ipc=host).",
        )


def _instruction_sets(facts: Facts) -> Iterator[Finding]:
    cpu = facts.cpu
    if cpu.architecture in ("x86_64", "AMD64") and not {"avx2", "fma"} <= cpu.flags:
        yield problem(
            "instruction sets",
            "The CPU (or the virtual machine's model of it) lacks AVX2 and FMA, which the CPU kernels need.",
            "In a virtual machine choose the host's CPU model (qemu -cpu host); on such a CPU only the plain torch "
            "path runs, slowly.",
        )
        return
    has = [
        "bf16 products in hardware" if cpu.native_bf16 else "bf16 widened to fp32",
        "int8 dot products in hardware" if cpu.native_int8 else "int8 without dot-product instruction",
    ]
    yield ok("instruction sets", f"{cpu.simd_bits}-bit vectors; {', '.join(has)}.")


def _compiler(facts: Facts) -> Iterator[Finding]:
    for name in ("g++", "clang++"):
        if version := facts.compilers.get(name):
            yield ok("compiler", f"{name} {version} can build the CPU kernels.")
            return
    if facts.kernels is not None and facts.kernels.built:
        yield ok("compiler", "No C++ compiler, and none is needed: the CPU kernels are built.")
        return
    yield warning(
        "compiler",
        "No C++ compiler: everything works, but on plain torch instead of the fast CPU kernels.",
        "Install one (apt install g++, dnf install gcc-c++) and run make setup again.",
    )


def _kernels(facts: Facts) -> Iterator[Finding]:
    kernels = facts.kernels
    if kernels is None:
        return
    built = f" (built: {', '.join(kernels.built)})" if kernels.built else ""
    if kernels.used is None:
        sentence = f"The CPU runs plain torch instead of our kernels{built}: {kernels.reason}."
    else:
        sentence = f"The CPU runs the {kernels.used} kernels{built}: {kernels.reason}."
    if kernels.remedy is None:
        yield ok("kernels", sentence)
    else:
        yield warning("kernels", sentence, kernels.remedy)


def _python(facts: Facts) -> Iterator[Finding]:
    version = ".".join(map(str, facts.python))
    if facts.python < (3, 11):
        yield problem("python", f"Python {version} is too old.", "Use Python 3.11 or newer.")
    else:
        yield ok("python", f"Python {version}.")


def _disk(facts: Facts) -> Iterator[Finding]:
    place = f"{facts.cache} (models and caches) has {size(facts.cache_free)} free"
    elsewhere = "Free some space, or set ANYRIG_HOME to a folder on a bigger disk."
    if not facts.cache_writable:
        yield problem("disk", f"{facts.cache} cannot be written to.", "Set ANYRIG_HOME to a folder that you own.")
    elif facts.cache_free < _LEAST_DISK:
        yield problem("disk", f"{place}: too little even for small models.", elsewhere)
    elif facts.cache_free < _ROOMY_DISK:
        yield warning("disk", f"{place}: enough for small models only.", elsewhere)
    else:
        yield ok("disk", f"{place}.")
