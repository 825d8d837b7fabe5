"""The machine's own limits, measured: reading memory, and matrix products in the types that weights are computed in."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from anyrig.hardware import memory
from anyrig.ops.cpu import native

# Rows, columns and depth of the product: large enough for its peak, small enough to take a fraction of a second.
GEMM = (512, 2048, 2048)
READ_BYTES = 512 << 20  # far above any cache
# The best try counts: nothing makes a machine look faster than it is, and much makes it look slower.
TRY_FOR = 0.5  # seconds for each ceiling, and at least this many tries:
_TRIES = 3
_KINDS = ("bfloat16", "int8", "float32")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured; None for a type that the method does not compute in.

    Attributes:
        memory_read_gb_s: GB/s (10^9 bytes) of all threads together.
        bfloat16_gflop_s, int8_gflop_s, float32_gflop_s: GFLOP/s of a matrix product (int8: GOP/s).
        threads: CPU threads that took part.
        method: whose kernels: ours ("native") or torch's. Torch's are no upper bound for ours.
    """

    memory_read_gb_s: float
    bfloat16_gflop_s: float | None
    int8_gflop_s: float | None
    float32_gflop_s: float | None
    threads: int
    method: str

    def gemm(self, kind: str) -> float | None:
        """GFLOP/s for weights of this kind; float16 counts as bfloat16, int4 as int8 (what it is multiplied in)."""
        stands_for = {"float16": "bfloat16", "int4": "int8"}.get(kind, kind)
        value: float | None = getattr(self, f"{stands_for}_gflop_s")
        return value

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(threads: int, device: str = "cpu") -> Ceilings:
    """Measure them, in a few seconds and with half a gigabyte of memory (less where less is free)."""
    if device == "cpu" and (kernels := native_module()) is not None:
        return _by_native(kernels, threads)
    return _by_torch(threads, device)


def native_module() -> Any | None:
    """Our compiled kernels, where they were built and can measure themselves."""
    found = native.module()
    return found if all(hasattr(found, name) for name in ("measure_read", "measure_gemm")) else None


def _read_bytes() -> int:
    free = memory.available_bytes()
    return min(READ_BYTES, max(64 << 20, free // 8)) if free else READ_BYTES


def _by_native(kernels: Any, threads: int) -> Ceilings:
    size = _read_bytes()

    def gemm(kind: str) -> float | None:
        try:
            return round(max(_tries(lambda: float(kernels.measure_gemm(kind, *GEMM, threads)))), 1)
        except (ValueError, RuntimeError):  # a type that this processor's build has no kernel for
            return None

    read = max(_tries(lambda: float(kernels.measure_read(size, threads))))
    kinds = {f"{kind}_gflop_s": gemm(kind) for kind in _KINDS}
    return Ceilings(round(read, 1), **kinds, threads=threads, method="native")


def _by_torch(threads: int, device: str) -> Ceilings:
    import torch

    before = torch.get_num_threads()
    try:
        if device == "cpu":
            torch.set_num_threads(threads)
        read = _torch_read(device)
        kinds = {f"{kind}_gflop_s": _torch_gemm(kind, device) for kind in _KINDS}
    finally:
        torch.set_num_threads(before)
    name = "torch " + torch.__version__.split("+")[0] + ("" if device == "cpu" else f" on {device}")
    return Ceilings(round(read, 1), **kinds, threads=threads, method=name)


def _torch_read(device: str) -> float:
    import torch

    # Of what torch has, sums of float32 read fastest.
    source = torch.ones(_read_bytes() // 4, device=device)
    return source.numel() * 4 / _best(source.sum, device) / 1e9


def _torch_gemm(kind: str, device: str) -> float | None:
    import torch

    m, n, k = GEMM if device == "cpu" else (8192, 8192, 8192)
    try:
        if kind == "int8":
            a, b = (torch.randint(-99, 99, s, dtype=torch.int8, device=device) for s in ((m, k), (n, k)))
            seconds = _best(lambda: torch._int_mm(a, b.t()), device)
        else:
            dtype = getattr(torch, kind)
            x, w = (torch.randn(s, device=device).to(dtype) for s in ((m, k), (n, k)))
            seconds = _best(lambda: torch.nn.functional.linear(x, w), device)
    except RuntimeError:  # an operation that this build or device lacks
        return None
    return round(2 * m * n * k / seconds / 1e9, 1)


def _best(run: Callable[[], Any], device: str) -> float:
    """Seconds of the quickest of several calls, after one that warms up."""
    import torch

    def timed() -> float:
        begin = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    with torch.inference_mode():
        timed()
        return min(_tries(timed))


def _tries(measure: Callable[[], float]) -> list[float]:
    """What a measurement says, again and again for `TRY_FOR` seconds."""
    found: list[float] = []
    end = time.perf_counter() + TRY_FOR
    while len(found) < _TRIES or time.perf_counter() < end:
        found.append(measure())
    return found
