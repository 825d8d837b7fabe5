"""What a request can ask for, and what it gets; with the real model."""

import math
import shutil

import pytest
import torch

from anyrig import SamplingParams
from anyrig.core.config import EngineConfig
from anyrig.core.errors import InvalidRequest, OutOfMemory, UsageError
from anyrig.engine.engine import Engine
from anyrig.engine.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The capital of France is"


def only(result):
    (completion,) = result.outputs
    return completion


def test_a_greedy_completion_says_what_the_model_knows(run):
    (result,) = run((PROMPT, GREEDY))
    assert result.finished and only(result).text.startswith(" Paris")
    assert only(result).finish_reason == "length" and len(only(result).token_ids) == 12


def test_text_and_token_ids_are_equal_prompts(run, engine):
    a, b = run((PROMPT, GREEDY), (engine.tokenizer.encode(PROMPT), GREEDY))
    assert only(a).token_ids == only(b).token_ids
    assert a.prompt == PROMPT and b.prompt is None


def test_an_end_token_ends_and_is_not_shown(run, engine):
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Say hi."}])
    (result,) = run((ids, GREEDY.replace(max_tokens=200)))
    assert only(result).finish_reason == "stop" and only(result).stop_reason is None
    assert only(result).token_ids[-1] in engine.info.eos_token_ids
    assert "<|im_end|>" not in only(result).text


def test_ignore_eos_goes_on(run, engine):
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Say hi."}])
    (result,) = run((ids, GREEDY.replace(max_tokens=60, ignore_eos=True)))
    assert len(only(result).token_ids) == 60


def test_min_tokens_holds_the_end_token_back(run, engine):
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": "Say hi."}])
    (result,) = run((ids, GREEDY.replace(max_tokens=80, min_tokens=70)))
    assert len(only(result).token_ids) >= 70


def test_a_stop_string_ends_the_text_before_it_even_across_tokens(run):
    (plain,) = run((PROMPT, GREEDY))
    text = only(plain).text
    stop = text[4:7]  # begins inside of the first token
    (stopped,) = run((PROMPT, GREEDY.replace(stop=[stop])))
    assert only(stopped).text == text[: text.index(stop)]
    assert only(stopped).finish_reason == "stop" and only(stopped).stop_reason == stop
    (kept,) = run((PROMPT, GREEDY.replace(stop=[stop], include_stop_str_in_output=True)))
    assert only(kept).text == text[: text.index(stop) + len(stop)]


def test_a_stream_never_shows_a_part_of_a_stop_string_and_ends_as_the_whole_does(engine, run):
    (plain,) = run((PROMPT, GREEDY.replace(max_tokens=20)))
    stop = only(plain).text[-9:-2]
    engine.add_request("s", PROMPT, GREEDY.replace(max_tokens=20, stop=[stop]), stream=True)
    texts = []
    while engine.has_unfinished():
        texts += [only(out).text for out in engine.step()]
    final = only(plain).text.split(stop)[0]
    assert texts[-1] == final
    assert all(final.startswith(t) for t in texts)
    assert len(texts) > 5


def test_a_stop_token_ends_and_is_named(run, engine):
    (plain,) = run((PROMPT, GREEDY))
    token = only(plain).token_ids[3]
    (stopped,) = run((PROMPT, GREEDY.replace(stop_token_ids=[token])))
    first = only(plain).token_ids.index(token)
    assert only(stopped).token_ids == only(plain).token_ids[: first + 1]
    assert only(stopped).stop_reason == token
    assert only(stopped).text == engine.tokenizer.decode(only(plain).token_ids[:first])


def test_n_completions_differ_share_their_prompt_and_are_the_same_again(run, engine):
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=8)
    prompt = PROMPT + " a city that I would like to visit in the spring of next year because it is"
    before = engine.stats.computed_tokens
    (first,) = run((prompt, params))
    computed = engine.stats.computed_tokens - before
    assert len({o.text for o in first.outputs}) > 1
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert computed < 2 * len(first.prompt_token_ids) + 4 * (8 + engine.config.page_size)
    (second,) = run((prompt, params))
    assert [o.token_ids for o in second.outputs] == [o.token_ids for o in first.outputs]


def test_requests_without_a_seed_differ_from_each_other(run):
    sampled = SamplingParams(temperature=1.0, max_tokens=12)
    results = run(*[(PROMPT, sampled)] * 4)
    assert len({only(r).text for r in results}) > 1


def test_logprobs_are_those_of_the_model_and_sorted(run):
    (result,) = run((PROMPT, GREEDY.replace(logprobs=5)))
    completion = only(result)
    assert len(completion.logprobs) == 12
    for token, scores in zip(completion.token_ids, completion.logprobs, strict=True):
        assert scores[token].rank == 1
        best = sorted(scores.values(), key=lambda s: s.rank)
        assert [s.rank for s in best] == [1, 2, 3, 4, 5]
        assert sum(math.exp(s.logprob) for s in best) <= 1 + 1e-6
    assert completion.cumulative_logprob == pytest.approx(
        sum(s[t].logprob for t, s in zip(completion.token_ids, completion.logprobs, strict=True))
    )


def test_prompt_logprobs_agree_with_what_sampling_saw_and_skip_the_prefix_cache(run, engine):
    (made,) = run((PROMPT, GREEDY.replace(logprobs=0)))
    completion = only(made)
    whole = made.prompt_token_ids + completion.token_ids
    (read,) = run((whole, GREEDY.replace(max_tokens=1, prompt_logprobs=2)))
    assert read.num_cached_tokens == 0
    assert read.prompt_logprobs[0] is None and len(read.prompt_logprobs) == len(whole)
    for token, scores, row in zip(
        completion.token_ids, completion.logprobs, read.prompt_logprobs[len(made.prompt_token_ids) :], strict=True
    ):
        assert row[token].logprob == scores[token].logprob


def test_prompt_logprobs_are_complete_after_a_preemption_in_mid_prompt(engine, run):
    ids = (engine.tokenizer.encode("It was the best of times, it was the worst of times. ") * 20)[:150]
    (expected,) = run((ids, GREEDY.replace(max_tokens=1, prompt_logprobs=0)))
    tight = Engine(
        "smollm2-135m",
        EngineConfig(dtype="float32", kv_cache_memory=208 * 46_080, max_chunk_tokens=32, max_model_len=200),
    )
    tight.add_request("urgent", [7] * 10, GREEDY.replace(max_tokens=60, ignore_eos=True), priority=-1)
    tight.add_request("x", ids, GREEDY.replace(max_tokens=1, prompt_logprobs=0))
    done = {}
    tight.step(), tight.step()
    tight.add_request("late", [9] * 60, GREEDY.replace(max_tokens=1), priority=-1)
    while tight.has_unfinished():
        done.update((out.request_id, out) for out in tight.step())
    assert tight.stats.preemptions > 0
    assert done["x"].prompt_logprobs == expected.prompt_logprobs


def test_streams_read_in_turn_and_generate_in_between_lose_nothing(engine, run):
    llm = LLM.__new__(LLM)
    llm.engine, llm._count, llm._streams = engine, 0, {}
    (expected,) = run((PROMPT, GREEDY))
    a, b = llm.stream(PROMPT, GREEDY), llm.stream("Once upon", GREEDY)
    next(a), next(b)
    (whole,) = llm.generate(PROMPT, GREEDY)
    last_a, last_b = list(a)[-1], list(b)[-1]
    assert only(whole).text == only(last_a).text == only(expected).text
    assert last_a.finished and last_b.finished and len(only(last_b).token_ids) == 12


def test_prompt_logprobs_of_a_prompt_in_chunks_are_those_of_a_prompt_at_once(run, engine):
    ids = (engine.tokenizer.encode("It was the best of times, it was the worst of times. ") * 60)[:400]
    (result,) = run((ids, GREEDY.replace(max_tokens=1, prompt_logprobs=0)))
    assert len(result.prompt_logprobs) == 400
    small = Engine("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="512MiB", max_chunk_tokens=100))
    small.add_request("x", ids, GREEDY.replace(max_tokens=1, prompt_logprobs=0))
    while small.has_unfinished():
        out = small.step()
    assert out[0].prompt_logprobs == result.prompt_logprobs


def test_choices_regex_and_schema_hold(run):
    a, b, c = run(
        ("Is snow white or black? Answer:", GREEDY.replace(choices=["white", "black"])),
        ("My phone number is", GREEDY.replace(regex=r" \d{3}-\d{4}", max_tokens=30)),
        (
            "A person as JSON:",
            GREEDY.replace(
                json_schema={
                    "type": "object",
                    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
                    "required": ["name", "age"],
                    "additionalProperties": False,
                },
                max_tokens=60,
            ),
        ),
    )
    import json
    import re

    assert only(a).text in ("white", "black") and only(a).finish_reason == "stop"
    assert re.fullmatch(r" \d{3}-\d{4}", only(b).text)
    person = json.loads(only(c).text)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_an_uncompilable_schema_is_an_error_at_once(engine):
    with pytest.raises(InvalidRequest, match="json_schema"):
        engine.add_request("x", PROMPT, GREEDY.replace(json_schema={"type": "no such type"}))
    with pytest.raises(InvalidRequest, match="regex"):
        engine.add_request("x", PROMPT, GREEDY.replace(regex="(["))
    assert not engine.has_unfinished()


def test_abort_frees_the_pages_at_once_and_keeps_what_was_made(engine):
    free = engine.scheduler.pool.available
    engine.add_request("gone", PROMPT, GREEDY.replace(max_tokens=100))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.pool.available < free
    out = engine.abort("gone")
    assert out.finished and only(out).finish_reason == "abort" and len(only(out).token_ids) == 5
    assert only(out).text.startswith(" Paris")
    assert engine.scheduler.pool.available == free
    assert not engine.has_unfinished() and engine.abort("gone") is None


def test_what_cannot_be_served_is_refused_by_name(engine):
    with pytest.raises(InvalidRequest, match=r"9000 tokens.*8192"):
        engine.add_request("x", [5] * 9000, GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add_request("x", "", GREEDY)
    with pytest.raises(InvalidRequest, match="99999999"):
        engine.add_request("x", [99_999_999], GREEDY)
    with pytest.raises(InvalidRequest, match="logit_bias"):
        engine.add_request("x", PROMPT, GREEDY.replace(logit_bias={99_999_999: 1.0}))
    engine.add_request("x", PROMPT, GREEDY)
    with pytest.raises(InvalidRequest, match="still running"):
        engine.add_request("x", PROMPT, GREEDY)
    engine.abort("x")


def test_output_stops_at_the_end_of_the_context():
    small = Engine("smollm2-135m", EngineConfig(dtype="float32", max_model_len=20, kv_cache_memory="64MiB"))
    small.add_request("x", [5] * 15, GREEDY.replace(max_tokens=None, ignore_eos=True))
    while small.has_unfinished():
        out = small.step()
    assert len(only(out[0]).token_ids) == 5 and only(out[0]).finish_reason == "length"


def test_a_cache_too_small_for_the_context_shortens_it_and_one_that_holds_nothing_is_refused(caplog):
    small = Engine("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="20MiB"))
    assert small.max_model_len < 8192
    assert "kv_cache_memory" in caplog.text
    with pytest.raises(OutOfMemory, match="kv_cache_memory"):
        Engine("smollm2-135m", EngineConfig(dtype="float32", kv_cache_memory="1kB"))


def test_options_that_do_not_exist_or_do_not_fit_are_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match="max_num_seqs"):
        LLM("smollm2-135m", max_num_seq=3)
    with pytest.raises(UsageError, match="8192"):
        LLM("smollm2-135m", max_model_len=100_000)


def test_a_prompt_that_is_refused_does_not_keep_the_others_from_running(engine):
    llm = LLM.__new__(LLM)
    llm.engine, llm._count, llm._streams = engine, 0, {}
    good, bad = llm.generate([PROMPT, [5] * 9000], GREEDY)
    assert only(good).finish_reason == "length"
    assert only(bad).finish_reason == "error" and "9000" in only(bad).error


def test_urgent_requests_run_first(engine):
    # Those that wait are started in order of priority: the urgent one has more tokens to compute, but is done first.
    for i in range(3):
        engine.add_request(f"p{i}", [1000 + i] * 40, GREEDY.replace(max_tokens=6), priority=i)
    engine.add_request("urgent", [2000] * 600, GREEDY.replace(max_tokens=1), priority=-1)
    engine.scheduler.max_num_seqs, before = 1, engine.scheduler.max_num_seqs
    order = []
    while engine.has_unfinished():
        order += [out.request_id for out in engine.step()]
    engine.scheduler.max_num_seqs = before
    assert order == ["urgent", "p0", "p1", "p2"]


def test_two_tenants_share_no_pages(engine):
    ids = list(range(3000, 3100))
    engine.add_request("a", ids, GREEDY.replace(max_tokens=1), cache_salt="a")
    while engine.has_unfinished():
        engine.step()
    for salt, hit in (("b", False), ("a", True)):
        engine.add_request("again", ids, GREEDY.replace(max_tokens=1), cache_salt=salt)
        while engine.has_unfinished():
            out = engine.step()
        assert (out[0].num_cached_tokens > 0) is hit


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A small model whose token 47000 is embedded as NaN."""
    from anyrig.models.load import load_random
    from anyrig.models.locate import resolve

    path = tmp_path_factory.mktemp("poisoned") / "model"
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "model_type": "llama",
        "vocab_size": 49152,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        **shape,
    }
    model = load_random({**config, "num_key_value_heads": 2, "max_position_embeddings": 512}, dtype=torch.bfloat16)
    model.get_input_embeddings().weight[47000] = float("nan")
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve("smollm2-135m").path / name, path / name)
    return str(path)


@pytest.mark.parametrize("runner, quantize", [("auto", "none"), ("auto", "int8"), ("auto", "int4"), ("paged", "none")])
def test_a_request_whose_logits_are_not_finite_ends_with_an_error_and_harms_nobody(poisoned, runner, quantize):
    small = Engine(poisoned, EngineConfig(runner=runner, quantize=quantize, kv_cache_memory="4MiB"))

    def run(*work):
        for i, (prompt, params) in enumerate(work):
            small.add_request(str(i), prompt, params)
        done = {}
        while small.has_unfinished():
            done.update((int(out.request_id), out) for out in small.step())
        return [done[i] for i in range(len(work))]

    ids = [5, 6, 7, 8]
    (before,) = run((ids, GREEDY))
    drawn = GREEDY.replace(temperature=1.0, seed=3)
    broken, good, too = run(([10, 47000, 11], GREEDY), (ids, GREEDY), ([47000, 12], drawn))
    for out in (broken, too):
        assert only(out).finish_reason == "error" and "finite" in only(out).error
    assert only(good).token_ids == only(before).token_ids
    # The pages that held NaN are used again: nothing of it is left.
    results = run(*[([i + 50] * 40, GREEDY) for i in range(8)])
    assert all(only(r).finish_reason == "length" for r in results)


@pytest.mark.parametrize("runner", ["auto", "paged"])
def test_an_engine_that_nobody_holds_gives_its_memory_back(runner):
    import gc
    import weakref

    gone = Engine("smollm2-135m", EngineConfig(dtype="bfloat16", kv_cache_memory="32MiB", runner=runner))
    model = weakref.ref(gone.runner)
    del gone
    gc.collect()
    assert model() is None
