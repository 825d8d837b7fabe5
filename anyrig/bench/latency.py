"""How long one request waits while others run: a closed loop of a given concurrency through the engine's steps."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyrig.bench.ceilings import Ceilings
from anyrig.bench.spread import spread, summary
from anyrig.bench.subject import Subject, peak_rss_mb
from anyrig.bench.throughput import Pass
from anyrig.bench.work import Work
from anyrig.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Waits:
    """One pass.

    Attributes:
        whole: its times as a whole, with the time to the first token of every request, from its own arrival.
        itl_s: seconds between any two tokens of a request that follow each other (inter-token latency).
    """

    whole: Pass
    itl_s: Sequence[float]


def run_pass(subject: Subject, work: Work, concurrency: int, seed: int) -> Waits:
    """`concurrency` requests in flight from the first to the last: one that ends is followed by the next at once."""
    engine, prompts = subject.engine, subject.prompts(work, seed)
    params = SamplingParams(max_tokens=work.gen, temperature=0, ignore_eos=True)
    waiting = iter(enumerate(prompts))
    first: list[float] = []
    gaps: list[float] = []
    seen: dict[str, tuple[int, float]] = {}  # tokens so far, and when the last one came

    def admit() -> None:
        if (following := next(waiting, None)) is not None:
            i, prompt = following
            engine.add_request(str(i), prompt, params, stream=True)
            seen[str(i)] = (0, time.perf_counter())

    before, start = engine.stats.steps, time.perf_counter()
    for _ in range(concurrency):
        admit()
    while engine.has_unfinished():
        outputs = engine.step()
        now = time.perf_counter()
        for out in outputs:
            tokens, then = seen[out.request_id]
            new = len(out.outputs[0].token_ids) - tokens
            if tokens == 0:
                first.append(now - then)
                gaps += [0.0] * (new - 1)
            else:  # tokens that come together wait for nobody after the first of them
                gaps += [now - then, *[0.0] * (new - 1)]
            seen[out.request_id] = (tokens + new, now)
            if out.finished:
                del seen[out.request_id]
                admit()
    seconds = time.perf_counter() - start
    lengths = [(len(p), work.gen) for p in prompts]
    return Waits(Pass(seconds, lengths, engine.stats.steps - before, peak_rss_mb(), first), gaps)


def measure(subject: Subject, work: Work, concurrency: int, repeats: int) -> list[Waits]:
    """A warm-up on a small part of the work, then `repeats` passes."""
    run_pass(subject, work.warm_up(), concurrency, 99)
    return [run_pass(subject, work, concurrency, number) for number in range(repeats)]


def result(
    subject: Subject, work: Work, concurrency: int, passes: Sequence[Waits], ceilings: Ceilings | None = None
) -> dict[str, Any]:
    """What `bench latency --json` prints: quantiles over the requests (or gaps) of all passes; seconds.

    `*_mean_s_spread` tells how far the means of the passes lie apart, as a share of their median.
    """
    best = max((p.whole for p in passes), key=lambda p: p.tokens_per_s)
    speeds = [p.whole.tokens_per_s for p in passes]
    keys = {
        "what": "latency",
        **subject.describe(),
        "work": work.name,
        "n": work.n,
        "concurrency": concurrency,
        "prompt": round(sum(p for p, _ in best.lengths) / work.n),
        "gen": work.gen,
        "load_s": round(subject.load_s, 2),
        "e2e_s": round(best.e2e_s, 4),
        "tokens_per_s": round(best.tokens_per_s, 1),
        "tokens_per_s_median": round(statistics.median(speeds), 1),
        "tokens_per_s_spread": round(spread(speeds), 3),
        **summary([t for p in passes for t in p.whole.ttft_s], "ttft"),
        "ttft_mean_s_spread": round(spread([statistics.fmean(p.whole.ttft_s) for p in passes]), 3),
    }
    if passes[0].itl_s:  # with one token each there are no gaps
        keys |= summary([t for p in passes for t in p.itl_s], "itl")
        keys["itl_mean_s_spread"] = round(spread([statistics.fmean(p.itl_s) for p in passes]), 3)
    keys |= {"steps": best.steps, "peak_rss_mb": max(p.whole.peak_rss_mb for p in passes)}
    return keys | subject.reached(best.lengths, best.e2e_s, best.steps, ceilings)
