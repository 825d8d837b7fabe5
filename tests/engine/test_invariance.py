"""One request, one result, bit for bit: whoever else is there, however the work is cut."""

import random

import pytest

from anyrig import SamplingParams
from anyrig.core.config import EngineConfig
from anyrig.engine.engine import Engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=6, logprobs=3, ignore_eos=True)
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4  # layers, keys and values, KV heads, head size, float32


def make_prompts():
    rng = random.Random(5)

    def some(n):
        return [rng.randrange(1000, 40000) for _ in range(n)]

    shared = some(40)
    return [some(rng.choice((1, 3, 17, 50, 70))) for _ in range(24)] + [shared + some(5) for _ in range(8)]


PROMPTS = make_prompts()
ALL = range(32)


def make_engine(dtype="float32", **options):
    return Engine("smollm2-135m", EngineConfig(dtype=dtype, **{"kv_cache_memory": "512MiB", **options}))


def run(engine, order):
    """Results by prompt: the tokens and all log-probabilities."""
    for i in order:
        engine.add_request(str(i), PROMPTS[i], GREEDY if i % 2 else SAMPLED)
    results = {}
    while engine.has_unfinished():
        for out in engine.step():
            (completion,) = out.outputs
            assert completion.finish_reason == "length"
            rows = [{t: lp.logprob for t, lp in row.items()} for row in completion.logprobs]
            results[int(out.request_id)] = (completion.token_ids, rows)
    return results


def assert_same(got, expected):
    for i, result in got.items():
        assert result == expected[i], f"prompt {i} of {len(PROMPTS[i])} tokens"


@pytest.fixture(scope="module")
def together():
    return run(make_engine(enable_prefix_caching=False), ALL)


def test_alone_or_among_31_others(together):
    engine = make_engine(enable_prefix_caching=False)
    for i in (0, 3, 4, 11, 24, 31):
        assert_same(run(engine, [i]), together)


def test_with_the_prefix_cache(together):
    engine = make_engine()
    assert_same(run(engine, ALL), together)
    assert_same(run(engine, ALL), together)
    assert engine.stats.cached_tokens > 0


@pytest.mark.parametrize("chunk", [16, 512])
def test_whatever_the_chunk_size(together, chunk):
    assert_same(run(make_engine(max_chunk_tokens=chunk, max_batch_tokens=512), ALL), together)


def test_when_pages_are_so_few_that_requests_are_preempted(together):
    engine = make_engine(kv_cache_memory=320 * BYTES_PER_TOKEN, max_model_len=200)
    assert_same(run(engine, ALL), together)
    assert engine.stats.preemptions > 0


def test_in_any_order(together):
    order = list(ALL)
    random.Random(1).shuffle(order)
    assert_same(run(make_engine(), order), together)


def test_on_one_thread_or_two(together):
    assert_same(run(make_engine(threads=1), [1, 2, 5, 30]), together)


def test_in_bfloat16():
    # Few and short ones: without bf16 instructions this is slow.
    some = [0, 1, 2, 24]
    expected = run(make_engine("bfloat16", enable_prefix_caching=False), some)
    small = make_engine("bfloat16", max_chunk_tokens=16)
    for i in reversed(some):
        assert_same(run(small, [i]), expected)
