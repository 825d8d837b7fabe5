"""What was reached, beside what the machine allows: GB/s, GFLOP/s, and the fastest that the ceilings permit."""

from typing import Any

from anyrig.bench.ceilings import Ceilings
from anyrig.bench.cost import Cost


def reached(
    prefill: Cost, decode: Cost, seconds: float, tokens: int, kind: str, ceilings: Ceilings | None
) -> dict[str, Any]:
    """Keys of a result: rates over the whole time, and their shares of the ceilings where those were measured.

    `roofline_tokens_per_s` is what a program would reach that is always at one of its limits (Williams et al. 2009,
    "Roofline"): each phase takes as long as the slower one of its arithmetic and its memory. `memory_tokens_per_s` and
    `compute_tokens_per_s` are each limit alone.

    Args:
        seconds: what both phases took together.
        tokens: that were generated.
        kind: of the arithmetic: float32, bfloat16, float16, int8 or int4.
    """
    both = prefill + decode
    keys: dict[str, Any] = {
        "gb_per_s": round(both.bytes / seconds / 1e9, 2),
        "gflop_per_s": round(both.flops / seconds / 1e9, 1),
    }
    if ceilings is None:
        return keys
    keys["ceilings"] = ceilings.to_dict()
    read = ceilings.memory_read_gb_s * 1e9
    keys |= {
        "memory_share": round(both.bytes / seconds / read, 3),
        "memory_tokens_per_s": round(tokens / (both.bytes / read), 1),
    }
    if (gemm := ceilings.gemm(kind)) is not None:
        peak = gemm * 1e9
        least = sum(max(phase.bytes / read, phase.flops / peak) for phase in (prefill, decode))
        keys |= {
            "compute_share": round(both.flops / seconds / peak, 3),
            "compute_tokens_per_s": round(tokens / (both.flops / peak), 1),
            "roofline_tokens_per_s": round(tokens / least, 1),
            "roofline_share": round(least / seconds, 3),
        }
    return keys
