"""One request, one result, bit for bit: whoever else is there, however the work is cut."""

import random

import pytest

from anyrig import SamplingParams
from anyrig.core.config import EngineConfig
from anyrig.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=8, logprobs=3, ignore_eos=True)


def prompts():
    rng = random.Random(5)
    shared = [rng.randrange(1000, 40000) for _ in range(40)]
    made = [[rng.randrange(1000, 40000) for _ in range(rng.choice((1, 3, 17, 50, 90)))] for _ in range(24)]
    return made + [shared + [rng.randrange(1000, 40000) for _ in range(5)] for _ in range(8)]


PROMPTS = prompts()


def params(i):
    return GREEDY if i % 2 else SAMPLED


def run(engine, order):
    """Results by prompt: the tokens and all log-probabilities."""
    for i in order:
        engine.add_request(str(i), PROMPTS[i], params(i))
    results = {}
    while engine.has_unfinished():
        for out in engine.step():
            (completion,) = out.outputs
            assert completion.finish_reason == "length"
            rows = [{t: lp.logprob for t, lp in row.items()} for row in completion.logprobs]
            results[int(out.request_id)] = (completion.token_ids, rows)
    return results


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def together(dtype):
    engine = Engine("smollm2-135m", EngineConfig(dtype=dtype, kv_cache_memory="512MiB", enable_prefix_caching=False))
    return run(engine, range(32))


def check(dtype, together, order=range(32), **options):
    options = {"kv_cache_memory": "512MiB", **options}
    engine = Engine("smollm2-135m", EngineConfig(dtype=dtype, **options))
    got = run(engine, order)
    for i in order:
        assert got[i] == together[i], f"prompt {i} of {len(PROMPTS[i])} tokens"
    return engine


def test_alone_or_among_31_others(dtype, together):
    engine = Engine("smollm2-135m", EngineConfig(dtype=dtype, kv_cache_memory="512MiB", enable_prefix_caching=False))
    for i in (0, 3, 11, 24, 31):
        assert run(engine, [i])[i] == together[i]


def test_with_the_prefix_cache(dtype, together):
    engine = check(dtype, together)
    again = run(engine, range(32))
    assert again == together
    assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize("chunk", [16, 512])
def test_whatever_the_chunk_size(dtype, together, chunk):
    check(dtype, together, max_chunk_tokens=chunk, max_batch_tokens=512)


def test_when_pages_are_so_few_that_requests_are_preempted(dtype, together):
    size = 30 * 16 * 46_080 * (2 if dtype == "bfloat16" else 4) // 4
    engine = check(dtype, together, kv_cache_memory=size, max_model_len=200)
    assert engine.stats.preemptions > 0


def test_in_any_order(dtype, together):
    order = list(range(32))
    random.Random(1).shuffle(order)
    check(dtype, together, order)
