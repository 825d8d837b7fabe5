"""Tokens per second of the engine, and of Transformers' static-batch `generate`, on the same work."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anyrig.bench import cost, roofline
from anyrig.bench.ceilings import Ceilings
from anyrig.bench.spread import spread
from anyrig.bench.subject import Subject, dtype_name, peak_rss_mb
from anyrig.bench.work import Work
from anyrig.core.config import EngineConfig
from anyrig.core.params import SamplingParams
from anyrig.engine.runner import pick_device
from anyrig.models import checkpoint, locate
from anyrig.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Pass:
    """The work, done once.

    Attributes:
        e2e_s: until the last token.
        lengths: `(prompt, generated)` tokens of each request.
        steps: that the engine took.
        peak_rss_mb: greatest memory of the process up to its end; ceilings are measured later, in memory of their own.
        ttft_s: seconds to the first token of each request; empty when the program can't tell.
    """

    e2e_s: float
    lengths: Sequence[tuple[int, int]]
    steps: int
    peak_rss_mb: int
    ttft_s: Sequence[float] = ()

    @property
    def tokens_per_s(self) -> float:
        return sum(g for _, g in self.lengths) / self.e2e_s


def run_pass(subject: Subject, work: Work, seed: int) -> Pass:
    """All requests at once, greedy, end tokens ignored."""
    engine, prompts = subject.engine, subject.prompts(work, seed)
    params = SamplingParams(max_tokens=work.gen, temperature=0, ignore_eos=True)
    before, start = engine.stats.steps, time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    first: list[float] = []
    while engine.has_unfinished():
        for out in engine.step():
            assert out.timing is not None and out.timing.first_token is not None
            first.append(out.timing.first_token - start)
    seconds = time.perf_counter() - start
    return Pass(seconds, [(len(p), work.gen) for p in prompts], engine.stats.steps - before, peak_rss_mb(), first)


def measure(subject: Subject, work: Work, repeats: int) -> list[Pass]:
    """A warm-up on a small part of the work, then `repeats` passes; random prompts differ from pass to pass."""
    run_pass(subject, work.warm_up(), 99)
    return [run_pass(subject, work, number) for number in range(repeats)]


def result(subject: Subject, work: Work, passes: Sequence[Pass], ceilings: Ceilings | None = None) -> dict[str, Any]:
    """What `bench throughput --json` prints."""
    best = max(passes, key=lambda p: p.tokens_per_s)
    keys = {"what": "throughput", **subject.describe(), **figures(work, passes), "load_s": round(subject.load_s, 2)}
    return keys | subject.reached(best.lengths, best.e2e_s, best.steps, ceilings)


def figures(work: Work, passes: Sequence[Pass]) -> dict[str, Any]:
    """The work and its times: of the best pass, with median and spread of all of them.

    `tokens_per_s` counts generated tokens over the whole time, prefill included.
    """
    best = max(passes, key=lambda p: p.tokens_per_s)
    speeds = [p.tokens_per_s for p in passes]
    prompt_tokens = sum(p for p, _ in best.lengths)
    return {
        "work": work.name,
        "n": work.n,
        "prompt": round(prompt_tokens / work.n),
        "gen": work.gen,
        "e2e_s": round(best.e2e_s, 4),
        "tokens_per_s": round(best.tokens_per_s, 1),
        "tokens_per_s_median": round(statistics.median(speeds), 1),
        "tokens_per_s_spread": round(spread(speeds), 3),
        "tokens_per_s_passes": [round(s, 1) for s in speeds],
        "prefill_tokens_per_s": round(prompt_tokens / max(best.ttft_s), 1) if best.ttft_s else None,
        "ttft_mean_s": round(statistics.fmean(best.ttft_s), 4) if best.ttft_s else None,
        "steps": best.steps,
        "peak_rss_mb": max(p.peak_rss_mb for p in passes),
    }


def measure_transformers(
    model: str,
    work: Work,
    config: EngineConfig,
    *,
    repeats: int = 2,
    ceilings: Ceilings | None = None,
    label: str | None = None,
) -> dict[str, Any]:
    """The same work through Transformers: one static batch, `generate` with sdpa attention, same dtype and threads."""
    # Not at the top: our own engine may run without them, and its memory is measured.
    import torch
    import transformers

    from anyrig.models import load

    start = time.perf_counter()
    files = locate.resolve(model)
    info = checkpoint.read_info(files.path)
    device = pick_device(config.device)
    kind = dtype_name(config, device)
    if device == "cpu" and config.threads:
        torch.set_num_threads(config.threads)
    loaded: Any = load.load(files.path, dtype=getattr(torch, kind), device=device, attn_implementation="sdpa")
    load_s = time.perf_counter() - start
    encode = Tokenizer.from_dir(files.path).encode if work.texts else None

    @torch.inference_mode()
    def generate(work: Work, seed: int) -> Pass:
        prompts = work.prompts(seed, info.vocab_size, encode)
        width = max(map(len, prompts))
        # Prompts of a file differ in length: padded on the left, as `generate` wants them.
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        begin = time.perf_counter()
        loaded.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=work.gen,
            min_new_tokens=work.gen,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return Pass(time.perf_counter() - begin, [(len(p), work.gen) for p in prompts], work.gen, peak_rss_mb())

    generate(work.warm_up(), 99)
    passes = [generate(work, number) for number in range(repeats)]
    best = max(passes, key=lambda p: p.tokens_per_s)
    shape = cost.read_shape(files.path)
    phases = cost.phases(
        shape,
        best.lengths,
        prefill_steps=1,
        decode_steps=work.gen - 1,
        weight_bytes=shape.parameters * cost.ITEMSIZE[kind],
        kv_itemsize=cost.ITEMSIZE[kind],
    )
    return {
        "what": "throughput",
        "peer": "transformers",
        "version": transformers.__version__,
        "model": label or model,
        "variant": f"generate, sdpa, {kind}",
        "weights": kind,
        "parameters": shape.parameters,
        "weight_mb": round(shape.parameters * cost.ITEMSIZE[kind] / 1e6),
        "threads": torch.get_num_threads() if device == "cpu" else None,
        **figures(work, passes),
        "load_s": round(load_s, 2),
        **roofline.reached(*phases, best.e2e_s, work.n * work.gen, kind, ceilings),
    }
