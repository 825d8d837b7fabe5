"""Several measurements of one thing in a few numbers."""

import statistics
from collections.abc import Sequence

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def spread(values: Sequence[float]) -> float:
    """How far passes lie apart: (greatest - least) / median; 0 for one pass."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of `values` lies, linear between neighbours (numpy's default)."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary(values: Sequence[float], name: str, digits: int = 5) -> dict[str, float]:
    """Mean and quantiles of seconds, as keys of a result: `ttft_mean_s`, `ttft_p50_s`, ..."""
    found = {"mean": statistics.fmean(values), **{key: quantile(values, q) for key, q in QUANTILES.items()}}
    return {f"{name}_{key}_s": round(value, digits) for key, value in found.items()}
