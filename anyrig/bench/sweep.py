"""Throughput over batch sizes, with the model loaded once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from anyrig.bench import throughput
from anyrig.bench.ceilings import Ceilings
from anyrig.bench.subject import Subject
from anyrig.bench.work import Work


def measure(
    subject: Subject, work: Work, sizes: Sequence[int], repeats: int, progress: Callable[[str], None]
) -> dict[int, list[throughput.Pass]]:
    """Every size in turn, `repeats` times over: what drifts on the machine meets all sizes alike."""
    passes: dict[int, list[throughput.Pass]] = {n: [] for n in sizes}
    throughput.run_pass(subject, replace(work, n=max(sizes)).warm_up(), 99)
    for number in range(repeats):
        for n in sizes:
            progress(f"pass {number + 1} of {repeats}: n={n}")
            passes[n].append(throughput.run_pass(subject, replace(work, n=n), number))
    return passes


def result(
    subject: Subject, work: Work, passes: dict[int, list[throughput.Pass]], ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """What `bench sweep --json` prints: `points` has the figures of `bench throughput`, one for each size."""
    points = []
    for n, done in passes.items():
        best = max(done, key=lambda p: p.tokens_per_s)
        point = throughput.figures(replace(work, n=n), done)
        del point["peak_rss_mb"], point["work"]
        point |= subject.reached(best.lengths, best.e2e_s, best.steps, ceilings)
        point.pop("ceilings", None)
        points.append(point)
    return {
        "what": "sweep",
        **subject.describe(),
        "work": work.name,
        "prompt": points[0]["prompt"],
        "gen": work.gen,
        "load_s": round(subject.load_s, 2),
        "peak_rss_mb": max(p.peak_rss_mb for done in passes.values() for p in done),
        "ceilings": None if ceilings is None else ceilings.to_dict(),
        "points": points,
    }
