"""Tokens per second of the engine, and of Transformers' static-batch `generate`, on the same work."""

import resource
import time
from typing import Any

import torch

from anyrig import __version__
from anyrig.bench.work import Work
from anyrig.core.config import EngineConfig
from anyrig.core.params import SamplingParams
from anyrig.engine.engine import Engine
from anyrig.engine.runner import pick_device, pick_dtype
from anyrig.models import checkpoint, load, locate

PASSES = 2  # the better one counts; before them comes a warm-up on a small part of the work


def measure_engine(model: str, work: Work, config: EngineConfig | None = None) -> dict[str, Any]:
    """Run the work through our engine, prefix cache off.

    Returns:
        the keys that every program of the comparison prints (`line`).
    """
    start = time.perf_counter()
    config = config or EngineConfig(enable_prefix_caching=False)
    engine = Engine(model, config)
    load_s = time.perf_counter() - start
    params = SamplingParams(max_tokens=work.gen, temperature=0, ignore_eos=True)
    _pass(engine, Work(min(work.n, 4), work.prompt, 8).prompts(99, engine.info.vocab_size), params)
    best: dict[str, Any] | None = None
    for number in range(PASSES):
        got = _pass(engine, work.prompts(number, engine.info.vocab_size), params)
        if best is None or got["e2e_s"] < best["e2e_s"]:
            best = got
    assert best is not None
    return line("anyrig", __version__, model, engine.describe(), work, load_s=load_s, **best)


def measure_transformers(model: str, work: Work, config: EngineConfig | None = None) -> dict[str, Any]:
    """The same work through Transformers: one static batch, `generate` with sdpa attention, same dtype and threads."""
    import transformers

    config = config or EngineConfig()
    start = time.perf_counter()
    files = locate.resolve(model)
    info = checkpoint.read_info(files.path)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    loaded: Any = load.load(files.path, dtype=dtype, device=device, attn_implementation="sdpa")
    load_s = time.perf_counter() - start

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> float:
        ids = torch.tensor(prompts, device=device)
        begin = time.perf_counter()
        loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - begin

    generate(Work(min(work.n, 4), work.prompt, 8).prompts(99, info.vocab_size), 8)
    e2e_s = min(generate(work.prompts(i, info.vocab_size), work.gen) for i in range(PASSES))
    variant = f"generate, sdpa, {str(dtype).removeprefix('torch.')}"
    return line("transformers", transformers.__version__, model, variant, work, load_s=load_s, e2e_s=e2e_s)


def _pass(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    first: list[float] = []
    while engine.has_unfinished():
        for out in engine.step():
            assert out.timing is not None and out.timing.first_token is not None
            first.append(out.timing.first_token - start)
    return {
        "e2e_s": time.perf_counter() - start,
        "ttft_mean_s": sum(first) / len(first),
        "prefill_s": max(first),
    }


def line(
    peer: str,
    version: str,
    model: str,
    variant: str,
    work: Work,
    *,
    load_s: float,
    e2e_s: float,
    ttft_mean_s: float | None = None,
    prefill_s: float | None = None,
) -> dict[str, Any]:
    """One result: `tokens_per_s` counts generated tokens over the whole time, prefill included."""
    usage = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "peer": peer,
        "version": version,
        "model": model,
        "variant": variant,
        "n": work.n,
        "prompt": work.prompt,
        "gen": work.gen,
        "load_s": round(load_s, 2),
        "e2e_s": round(e2e_s, 3),
        "tokens_per_s": round(work.n * work.gen / e2e_s, 1),
        "prefill_tokens_per_s": round(work.n * work.prompt / prefill_s, 1) if prefill_s else None,
        "ttft_mean_s": round(ttft_mean_s, 4) if ttft_mean_s else None,
        "peak_rss_mb": round(usage / 1024),
    }
