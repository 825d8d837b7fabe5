"""Pictures of results (matplotlib, `pip install 'anyrig[bench]'`): a sweep over batch sizes, and a comparison."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anyrig.bench.compare import Comparison
from anyrig.core.errors import DataError, UsageError

SUFFIXES = (".png", ".svg")
# Okabe and Ito's colours: told apart by colour-blind readers too.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#6B6B6B"
# What a comparison of two single results shows, in this order.
_BARS = ("tokens_per_s", "prefill_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "itl_mean_s", "itl_p99_s")
_BARS_LAST = ("load_s", "peak_rss_mb")


def check_plot(file: Path) -> None:
    """Find out before the measurement whether `file` can be drawn.

    Raises:
        UsageError: another kind of file, no such directory, or matplotlib is not installed.
    """
    if file.suffix not in SUFFIXES:
        raise UsageError(f"--plot writes {' or '.join(SUFFIXES)}. Given: {file}")
    if not file.expanduser().absolute().parent.is_dir():
        raise UsageError(f"--plot: there is no directory {file.parent}")
    if find_spec("matplotlib") is None:
        raise UsageError("--plot draws with matplotlib, which is not installed", "pip install 'anyrig[bench]'")


def plot_sweep(result: Mapping[str, Any], file: Path) -> None:
    """Tokens/s over batch size, with what memory and arithmetic allow as lines where ceilings were measured."""
    figure, axes = _figure()
    points = sorted(result["points"], key=lambda p: p["n"])
    sizes = [p["n"] for p in points]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for key, label, style in (
        ("memory_tokens_per_s", "ceiling: reading memory", (0, (5, 2))),
        ("compute_tokens_per_s", f"ceiling: {result.get('weights')} products", (0, (1, 1.2))),
    ):
        if all(p.get(key) for p in points):
            axes.plot(sizes, [p[key] for p in points], color=_GREY, linestyle=style, linewidth=1.3, label=label)
    if all(p.get("roofline_tokens_per_s") for p in points):
        limit = [p["roofline_tokens_per_s"] for p in points]
        axes.plot(sizes, limit, color=_ORANGE, linewidth=1.3, label="ceiling: both, phase by phase")
    best = [p["tokens_per_s"] for p in points]
    low = [min(p["tokens_per_s_passes"]) for p in points]
    axes.fill_between(sizes, low, best, color=_BLUE, alpha=0.2, linewidth=0, label="all passes")
    axes.plot(sizes, best, color=_BLUE, marker="o", markersize=5, linewidth=2, label="measured, best pass")
    for point in points:
        share = point.get("roofline_share")
        text = _number(point["tokens_per_s"]) + (f"\n{share:.0%}" if share else "")
        below = (0, -7) if share else (0, 7)
        axes.annotate(
            text,
            (point["n"], point["tokens_per_s"]),
            xytext=below,
            textcoords="offset points",
            ha="center",
            va="top" if share else "bottom",
            fontsize=8,
            color=_BLUE,
        )
    axes.set_xticks(sizes, [str(n) for n in sizes])
    axes.minorticks_off()
    axes.set_xlabel("requests at once")
    axes.set_ylabel("generated tokens/s")
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom / 2, top * 1.2)
    axes.yaxis.set_major_formatter(lambda value, _: _number(value))
    axes.legend(loc="best", frameon=False, fontsize=8)
    under = _under(result)
    if result.get("ceilings"):
        method = result["ceilings"]["method"]
        under += f", ceilings of {'our kernels' if method == 'native' else method}; %: share of both"
    _head(figure, f"{result['model']}, {result.get('weights')}: throughput over batch size", under)
    _save(figure, file)


def plot_compare(comparison: Comparison, file: Path) -> None:
    """Bars: tokens/s of both for each batch size of sweeps; otherwise how many times better B is in each measure."""
    if comparison.sizes:
        _grouped(comparison, file)
    else:
        _gains(comparison, file)


def _grouped(comparison: Comparison, file: Path) -> None:
    figure, axes = _figure()
    rows = [row for row in comparison.rows if row.key == "tokens_per_s" and row.n is not None]
    at = range(len(rows))
    for side, color, shift in (("a", _GREY, -0.2), ("b", _BLUE, 0.2)):
        values = [getattr(row, side) for row in rows]
        name = comparison.names[0 if side == "a" else 1]
        bars = axes.bar([i + shift for i in at], values, width=0.38, color=color, label=name)
        axes.bar_label(bars, [_number(v) for v in values], padding=2, fontsize=8, color=color)
    top = max(max(row.a, row.b) for row in rows)
    for i, row in zip(at, rows, strict=True):
        color = _GREEN if row.gain >= 1 else _ORANGE
        axes.annotate(
            f"{row.ratio:.2f}x",
            (i, max(row.a, row.b) + 0.055 * top),
            ha="center",
            va="bottom",
            fontsize=10,
            fontweight="bold",
            color=color,
        )
    axes.set_ylim(0, top * 1.2)
    axes.set_xticks(list(at), [str(row.n) for row in rows])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("generated tokens/s")
    axes.yaxis.set_major_formatter(lambda value, _: _number(value))
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    _head(figure, _versus(comparison), _under(comparison.a))
    _save(figure, file)


def _gains(comparison: Comparison, file: Path) -> None:
    by_key = {row.key: row for row in comparison.rows}
    rows = [by_key[key] for key in (*_BARS, *_BARS_LAST) if key in by_key]
    figure, axes = _figure(height=1.9 + 0.45 * len(rows))
    at = range(len(rows))
    gains = [row.gain for row in rows]
    colors = [_GREY if 0.995 < g < 1.005 else _GREEN if g > 1 else _ORANGE for g in gains]
    # A logarithmic axis: twice as good and half as good are bars of the same length, to either side of 1.
    axes.set_xscale("log")
    reach = 1.25 * max(1.2, *gains, *(1 / g for g in gains))
    axes.set_xlim(1 / reach, reach)
    axes.barh(list(at), [g - 1 for g in gains], left=1, height=0.6, color=colors)
    for i, gain, color in zip(at, gains, colors, strict=True):
        axes.annotate(
            f"{gain:.2f}x",
            (gain, i),
            xytext=(4 if gain >= 0.995 else -4, 0),
            textcoords="offset points",
            ha="left" if gain >= 0.995 else "right",
            va="center",
            fontsize=9,
            fontweight="bold",
            color=color,
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(list(at), [row.measure.label + _unit(row.key) for row in rows])
    values = axes.secondary_yaxis("right")
    values.set_yticks(list(at), [f"{_number(row.a)} → {_number(row.b)}" for row in rows], color=_GREY, fontsize=9)
    values.tick_params(length=0)
    values.spines["right"].set_visible(False)
    axes.invert_yaxis()
    steps = [s for s in (0.1, 0.2, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50) if 1 / reach <= s <= reach]
    axes.set_xticks(steps, [f"{s:g}x" for s in steps])
    axes.minorticks_off()
    axes.set_xlabel(f"how many times better {comparison.names[1]} is (of times and memory, less is better)")
    axes.grid(axis="y", visible=False)
    _head(figure, _versus(comparison), _under(comparison.a))
    _save(figure, file)


def _figure(height: float = 4.8) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _head(figure: Any, title: str, under: str) -> None:
    height = figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.6 / height))
    figure.text(0.015, 1 - 0.12 / height, title, ha="left", va="top", fontsize=12, fontweight="bold")
    figure.text(0.015, 1 - 0.37 / height, under, ha="left", va="top", fontsize=9, color=_GREY)


def _under(result: Mapping[str, Any]) -> str:
    parts = [
        f"{result['n']} requests of" if "n" in result else "requests of",
        f"{result['prompt']} + {result['gen']} tokens" + (f" ({work})" if (work := result.get("work")) else ""),
    ]
    text = " ".join(parts)
    if result.get("concurrency"):
        text += f", {result['concurrency']} at once"
    if result.get("threads"):
        text += f", {result['threads']} threads"
    return text


def _versus(comparison: Comparison) -> str:
    first, second = comparison.names
    models = list(dict.fromkeys(str(side.get("model")) for side in (comparison.a, comparison.b)))
    return f"{second} against {first} ({models[0]})" if len(models) == 1 else f"{second} against {first}"


def _unit(key: str) -> str:
    return " [s]" if key.endswith("_s") and "per_s" not in key else " [MB]" if key.endswith("_mb") else ""


def _number(value: float) -> str:
    """Three digits are enough in a picture."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _save(figure: Any, file: Path) -> None:
    try:
        figure.savefig(file.expanduser(), dpi=150)
    except OSError as error:
        raise DataError(f"cannot write the picture {file} ({error.strerror})") from None
