"""Results as a person reads them."""

from collections.abc import Mapping, Sequence
from typing import Any

from anyrig.bench.ceilings import Ceilings
from anyrig.bench.compare import Comparison


def throughput(result: Mapping[str, Any]) -> str:
    lines = [
        result["variant"],
        f"{_work(result)}: {result['tokens_per_s']:,.1f} tokens/s {_passes(result)}",
    ]
    if result["ttft_mean_s"] is not None:
        lines.append(
            f"prefill {result['prefill_tokens_per_s']:,.0f} tokens/s · mean time to first token "
            f"{result['ttft_mean_s']:.2f} s"
        )
    return "\n".join([*lines, *_machine(result), _memory(result)])


def latency(result: Mapping[str, Any]) -> str:
    rows = [["", "mean", "p50", "p90", "p99", "spread of means"]]
    for key, label in (("ttft", "time to first token"), ("itl", "between tokens")):
        if f"{key}_mean_s" in result:
            values = [f"{1000 * result[f'{key}_{q}_s']:,.1f} ms" for q in ("mean", "p50", "p90", "p99")]
            rows.append([label, *values, f"{result[f'{key}_mean_s_spread']:.1%}"])
    head = f"{_work(result)}, {result['concurrency']} at once: {result['tokens_per_s']:,.1f} tokens/s {_passes(result)}"
    return "\n".join([result["variant"], head, _table(rows), *_machine(result), _memory(result)])


def sweep(result: Mapping[str, Any]) -> str:
    shares = result["ceilings"] is not None
    head = ["n", "tokens/s", "median", "spread", "prefill tokens/s", "first token", "GB/s", "GFLOP/s"]
    rows = [head + (["of memory", "of products", "of both"] if shares else [])]
    for p in result["points"]:
        row = [
            str(p["n"]),
            f"{p['tokens_per_s']:,.1f}",
            f"{p['tokens_per_s_median']:,.1f}",
            f"{p['tokens_per_s_spread']:.1%}",
            f"{p['prefill_tokens_per_s']:,.0f}",
            f"{p['ttft_mean_s']:.2f} s",
            f"{p['gb_per_s']:,.1f}",
            f"{p['gflop_per_s']:,.0f}",
        ]
        if shares:
            row += [_share(p, key) for key in ("memory_share", "compute_share", "roofline_share")]
        rows.append(row)
    lines = [result["variant"], f"requests of {result['prompt']} + {result['gen']} tokens", _table(rows)]
    if result["ceilings"]:
        lines.append(ceilings(Ceilings(**result["ceilings"])))
    return "\n".join([*lines, _memory(result)])


def compare(comparison: Comparison) -> str:
    a, b = comparison.names
    rows = [["n", "measure", a, b, f"{b} / {a}", ""]]
    for row in comparison.rows:
        better = "" if 0.995 < row.ratio < 1.005 else "better" if row.gain > 1 else "worse"
        size = "" if row.n is None else str(row.n)
        rows.append([size, row.measure.label, f"{row.a:,.6g}", f"{row.b:,.6g}", f"{row.ratio:.3f}", better])
    lines = [f"{name}: {_who(side)}" for name, side in ((a, comparison.a), (b, comparison.b))]
    return "\n".join([*lines, _table(rows, left=(1, 5))])


def ceilings(measured: Ceilings) -> str:
    """One line; what the method can't compute is left out."""
    parts = [f"memory read {measured.memory_read_gb_s:,.1f} GB/s"]
    for kind, unit in (("bfloat16", "GFLOP/s"), ("int8", "GOP/s"), ("float32", "GFLOP/s")):
        if (value := measured.gemm(kind)) is not None:
            parts.append(f"{kind} products {value:,.0f} {unit}")
    return f"ceilings ({measured.method}, {measured.threads} threads): " + ", ".join(parts)


def perplexity(result: Mapping[str, Any]) -> str:
    rows = [["weights", "perplexity", "change", "tokens/s"]]
    for r in result["results"]:
        change = "" if r["change_percent"] is None else f"{r['change_percent']:+.2f}%"
        rows.append([r["weights"], f"{r['perplexity']:.3f}", change, f"{r['tokens_per_s']:,.0f}"])
    head = (
        f"{result['model']} on {result['text']}: {result['tokens']:,} tokens scored, windows of {result['window']}, "
        f"stride {result['stride']}"
    )
    return "\n".join([head, _table(rows, left=(0,))])


def _work(result: Mapping[str, Any]) -> str:
    plural = "s" if result["n"] > 1 else ""
    return f"{result['n']} request{plural} of {result['prompt']} + {result['gen']} tokens"


def _passes(result: Mapping[str, Any]) -> str:
    return f"(median {result['tokens_per_s_median']:,.1f}, spread {result['tokens_per_s_spread']:.1%})"


def _machine(result: Mapping[str, Any]) -> list[str]:
    """Rates, and their shares where ceilings were measured."""
    rates = f"{result['gb_per_s']:,.1f} GB/s · {result['gflop_per_s']:,.0f} GFLOP/s"
    if "ceilings" not in result:
        return [rates]
    shares = f"{_share(result, 'memory_share')} of memory, {_share(result, 'compute_share')} of products"
    limit = result.get("roofline_tokens_per_s")
    both = f" · both allow {limit:,.0f} tokens/s, {_share(result, 'roofline_share')} reached" if limit else ""
    return [f"{rates}: {shares}{both}", ceilings(Ceilings(**result["ceilings"]))]


def _share(result: Mapping[str, Any], key: str) -> str:
    if key not in result:
        return "-"
    return f"{result[key]:.0%}" if result[key] >= 0.1 else f"{result[key]:.1%}"


def _memory(result: Mapping[str, Any]) -> str:
    return f"loaded in {result['load_s']:.1f} s · peak memory {result['peak_rss_mb']:,} MB"


def _who(result: Mapping[str, Any]) -> str:
    return f"{result.get('peer')} {result.get('version')}, {result.get('model')}, {result.get('variant')}"


def _table(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell: text (`left`, and an unnamed first column) to the left, numbers right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (*left, 0) if not rows[0][0] else left
    lines = (
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join("  " + line.rstrip() for line in lines)
