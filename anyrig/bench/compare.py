"""Two results of the same work, as ratios."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyrig.core.errors import DataError


@dataclass(frozen=True, slots=True)
class Measure:
    """One key of a result that can be compared."""

    label: str
    higher_is_better: bool = True


MEASURES = {
    "tokens_per_s": Measure("tokens/s"),
    "tokens_per_s_median": Measure("tokens/s, median of passes"),
    "prefill_tokens_per_s": Measure("prefill tokens/s"),
    **{f"ttft_{q}_s": Measure(f"time to first token, {q}", False) for q in ("mean", "p50", "p90", "p99")},
    **{f"itl_{q}_s": Measure(f"inter-token latency, {q}", False) for q in ("mean", "p50", "p90", "p99")},
    "load_s": Measure("load", False),
    "peak_rss_mb": Measure("peak memory", False),
}
# What makes two results comparable. `parameters` stands for the model: its name may be a path in one of them.
_WORK = ("what", "work", "n", "concurrency", "prompt", "gen", "parameters")


@dataclass(frozen=True, slots=True)
class Row:
    """One measure in both results; `n` is None for what does not depend on it.

    Attributes:
        ratio: b / a.
        gain: how many times better b is: the ratio, or its inverse where less is better.
    """

    n: int | None
    key: str
    a: float
    b: float

    @property
    def measure(self) -> Measure:
        return MEASURES[self.key]

    @property
    def ratio(self) -> float:
        return self.b / self.a

    @property
    def gain(self) -> float:
        return self.ratio if self.measure.higher_is_better else 1 / self.ratio


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results and their common measures."""

    a: Mapping[str, Any]
    b: Mapping[str, Any]
    names: tuple[str, str]
    rows: tuple[Row, ...]

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that both sweeps have; empty for other results."""
        return list(dict.fromkeys(row.n for row in self.rows if row.n is not None and self.a["what"] == "sweep"))

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {
                "n": row.n,
                "measure": row.key,
                "a": row.a,
                "b": row.b,
                "ratio": round(row.ratio, 4),
                "higher_is_better": row.measure.higher_is_better,
            }
            for row in self.rows
        ]
        return {"what": "compare", "a": _title(self.a), "b": _title(self.b), "names": self.names, "rows": rows}


def read(file: Path) -> dict[str, Any]:
    """The result in a file: what `-o` wrote, or the last JSON line of what a program printed.

    Raises:
        DataError: unreadable, or nothing in it is a result.
    """
    try:
        text = file.expanduser().read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read the result {file} ({error.strerror})") from None
    except UnicodeDecodeError:
        raise DataError(f"{file} is not a result of `anyrig bench`", "give a file that `-o FILE` wrote") from None
    for part in (text, *reversed(text.splitlines())):
        try:
            found = json.loads(part)
        except ValueError:
            continue
        if isinstance(found, dict) and ("tokens_per_s" in found or found.get("what") == "sweep"):
            return {"what": "throughput", **found}  # other programs' lines do not say what they are
    raise DataError(f"{file} is not a result of `anyrig bench`", "give a file that `-o FILE` wrote")


def names(a: Path, b: Path) -> tuple[str, str]:
    """What two results are called: their files' stems, or the paths where those are the same."""
    return (a.stem, b.stem) if a.stem != b.stem else (str(a), str(b))


def compare(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Every measure that both have; of sweeps, for each batch size that both have.

    Raises:
        DataError: naming what differs, when the work was not the same.
    """
    for key in _WORK:
        if key in a and key in b and a[key] != b[key]:
            raise DataError(
                f"{names[0]} and {names[1]} did different work: `{key}` is {a[key]!r} in one, {b[key]!r} in the other",
                "compare results of the same command and model",
            )
    if a["what"] != "sweep":
        return Comparison(a, b, names, tuple(_rows(a.get("n"), a, b)))
    points = [{point["n"]: point for point in result["points"]} for result in (a, b)]
    shared = [n for n in points[0] if n in points[1]]
    if not shared:
        raise DataError(
            f"{names[0]} and {names[1]} have no batch size in common: `n` is {', '.join(map(str, points[0]))} in one "
            f"and {', '.join(map(str, points[1]))} in the other",
            "give both sweeps the same --n",
        )
    rows = [row for n in shared for row in _rows(n, points[0][n], points[1][n])]
    return Comparison(a, b, names, (*rows, *_rows(None, a, b)))


def _rows(n: int | None, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    return [Row(n, key, a[key], b[key]) for key in MEASURES if a.get(key) and b.get(key)]


def _title(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result.get(key) for key in ("peer", "version", "model", "variant", "weights")}
