"""The sampler: what each parameter does to a row, and that a row never depends on its company."""

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from anyrig.core.errors import InvalidRequest
from anyrig.core.params import SamplingParams
from anyrig.engine.adjust import check_token_ids
from anyrig.engine.sampler import Sampled, Sampler, SampleRow

KINDS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 1.0},
    {"temperature": 0.7, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.2, "top_p": 0.99, "logprobs": 3},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "logprobs": 7},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.4, "top_p": 0.95},
    {"temperature": 1.0, "logit_bias": {3: 5.0, 900: -3.0}, "logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": [1, 5, 9, 800, 1001], "logprobs": 4},
    {"temperature": 0, "banned_token_ids": [1, 2, 3], "min_tokens": 10},
]


class Only:
    """A grammar that allows the given ids."""

    def __init__(self, *ids: int, finished: bool = False) -> None:
        self.ids = ids
        self.finished = finished

    def allowed(self, width: int) -> NDArray[np.bool_]:
        mask = np.zeros(width, np.bool_)
        mask[list(self.ids)] = True
        return mask

    def allowed_if_few(self, width: int) -> NDArray[np.int64] | None:
        return np.array(self.ids) if len(self.ids) < 100 else None


def row(output: list[int] | None = None, seed: int = 0, grammar: object = None, **params: object) -> SampleRow:
    return SampleRow(SamplingParams(**params), [4, 8, 8, 15], [] if output is None else output, seed, grammar, (0,))  # type: ignore[arg-type]


def one(logits: torch.Tensor | list[float], row: SampleRow, mode: str = "raw") -> Sampled:
    logits = torch.as_tensor(logits)
    return Sampler(len(logits), mode).sample(logits[None], [row])[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(49152, "float32"), (262144, "float32"), (1003, "float32"), (1003, "bfloat16")]
)
def test_a_row_is_bit_identical_alone_and_in_any_company(vocab: int, dtype: str, mode: str) -> None:
    torch.manual_seed(vocab)
    kinds = KINDS if vocab < 100_000 else KINDS[:11]
    logits = (torch.randn(32, vocab) * 4).to(getattr(torch, dtype))

    def rows() -> list[SampleRow]:
        return [row([i, i, 7], seed=i, **kinds[i % len(kinds)]) for i in range(32)]

    sampler = Sampler(vocab, mode)  # type: ignore[arg-type]
    together = sampler.sample(logits, rows())
    assert all(s.error is None for s in together)
    for i in range(len(kinds)):
        assert Sampler(vocab, mode).sample(logits[i : i + 1], rows()[i : i + 1]) == [together[i]]  # type: ignore[arg-type]
    order = random.Random(1).sample(range(32), 32)
    again = rows()
    assert sampler.sample(logits[order], [again[i] for i in order]) == [together[i] for i in order]
    few = order[:5]
    again = rows()
    assert sampler.sample(logits[few], [again[i] for i in few]) == [together[i] for i in few]


def test_the_logits_are_left_as_they_are() -> None:
    logits = torch.randn(len(KINDS), 1003)
    before = logits.clone()
    Sampler(1003).sample(logits, [row([1, 2], **kind) for kind in KINDS])
    assert torch.equal(logits, before)


def test_a_redone_row_draws_the_same_token_and_the_next_position_another_one() -> None:
    logits = torch.zeros(2000)
    first = one(logits, row([1, 2, 3], seed=9)).token_id
    assert one(logits, row([1, 2, 3], seed=9)).token_id == first
    others = {one(logits, row([0] * n, seed=9)).token_id for n in range(20)}
    others |= {one(logits, row([1, 2, 3], seed=s)).token_id for s in range(20)}
    assert len(others) > 35


def test_penalties_follow_their_formulas_as_the_output_grows() -> None:
    torch.manual_seed(2)
    logits = torch.randn(64)
    output: list[int] = []
    r = row(output, temperature=0, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2, logprobs=64)
    sampler = Sampler(64, "processed")
    for step in range(12):
        expected = logits.double().clone()
        for t in {4, 8, 15, *output}:
            expected[t] = expected[t] / 1.5 if expected[t] > 0 else expected[t] * 1.5
        for t in set(output):
            expected[t] -= 0.2 * output.count(t) + 0.3
        result = sampler.sample(logits[None], [r])[0]
        assert result.token_id == int(expected.argmax())
        exact = torch.log_softmax(expected, -1)
        assert result.logprobs is not None
        assert {t: v for t, (v, _) in result.logprobs.items()} == pytest.approx(
            dict(enumerate(exact.tolist())), abs=1e-5
        )
        output.append(result.token_id if step % 2 else 8)


def test_bias_allowed_and_banned_tokens() -> None:
    logits = [5.0, 4.0, 3.0, 2.0]
    assert one(logits, row(temperature=0, logit_bias={2: 3.0})).token_id == 2
    assert one(logits, row(temperature=0, allowed_token_ids=[3, 2])).token_id == 2
    assert one(logits, row(temperature=0, banned_token_ids=[0, 1])).token_id == 2
    assert one(logits, row(temperature=0, allowed_token_ids=[1, 3], banned_token_ids=[1])).token_id == 3


def test_end_tokens_are_forbidden_before_min_tokens() -> None:
    logits = [5.0, 4.0, 3.0]
    early, late = [9], [9, 9]
    assert one(logits, row(early, temperature=0, min_tokens=2, stop_token_ids=[1])).token_id == 2
    assert one(logits, row(late, temperature=0, min_tokens=2, stop_token_ids=[1])).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_masks_and_its_end_comes_before_min_tokens(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3000)
    assert one(logits, row(grammar=Only(17), temperature=temperature)).token_id == 17
    wide = Only(*range(1000, 3000))
    assert one(logits, row(grammar=wide, temperature=temperature)).token_id >= 1000
    ended = Only(0, finished=True)
    assert one(logits, row(grammar=ended, temperature=temperature, min_tokens=5)).token_id == 0


def test_nothing_allowed_is_an_error_of_that_row_only() -> None:
    rows = [row(temperature=t, allowed_token_ids=[0], min_tokens=3) for t in (0, 1)] + [row(), row(temperature=0)]
    results = Sampler(4).sample(torch.zeros(4, 4), rows)
    assert [r.error is None for r in results] == [False, False, True, True]
    assert "no token is allowed" in str(results[0].error)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_row_that_is_not_finite_fails_alone(kind: int, poison: float) -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 1003)
    rows = [row([1], seed=i, **KINDS[k]) for i, k in enumerate((kind, kind, 2, 0))]
    clean = Sampler(1003).sample(logits, rows)
    logits[1, 640] = poison
    results = Sampler(1003).sample(logits, rows)
    assert "not finite" in str(results[1].error)
    assert (results[1].token_id, results[1].logprobs) == (-1, None)
    assert [results[i] for i in (0, 2, 3)] == [clean[i] for i in (0, 2, 3)]


def test_raw_logprobs_are_the_models_own_and_processed_those_sampled_from() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    params = {"temperature": 0.5, "top_k": 2, "banned_token_ids": [0], "logprobs": 4}
    raw = one(logits, row(seed=1, **params))
    exact = torch.log_softmax(logits.double(), -1)
    assert raw.logprobs is not None
    assert raw.logprob == pytest.approx(float(exact[raw.token_id]))
    assert list(raw.logprobs)[1:] == [t for t in (0, 1, 2, 3) if t != raw.token_id]
    processed = one(logits, row(seed=1, **params), "processed")
    assert processed.token_id == raw.token_id
    assert processed.logprobs is not None
    # Tokens 1 and 2 are left, one apart, at half the temperature.
    left = {t: v for t, (v, _) in processed.logprobs.items()}
    assert left == pytest.approx({1: -np.log1p(np.exp(-2.0)), 2: -2 - np.log1p(np.exp(-2.0))}, abs=1e-6)
    assert [processed.logprobs[t][1] for t in (1, 2)] == [1, 2]


def test_processed_logprobs_of_greedy_rows_have_masks_but_no_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    result = one(logits, row(temperature=0, banned_token_ids=[0], logprobs=2, top_k=1), "processed")
    assert result.token_id == 1
    assert result.logprob == pytest.approx(-np.log1p(np.exp(-1.0)))


@pytest.mark.parametrize("vocab", [1003, 49152])
def test_prompt_logprobs_give_the_target_and_the_best_and_ignore_company(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(37, vocab)
    targets = torch.randint(vocab, (37,)).tolist()
    sampler = Sampler(vocab)
    scores = sampler.prompt_logprobs(logits, targets, 3)
    exact = torch.log_softmax(logits.double(), -1)
    for i, (target, score) in enumerate(zip(targets, scores, strict=True)):
        assert list(score) == list(dict.fromkeys([target, *exact[i].topk(3).indices.tolist()]))
        assert score[target][0] == pytest.approx(float(exact[i, target]), abs=1e-4)
        assert score[target][1] == 1 + int((exact[i] > exact[i, target]).sum())
        assert sampler.prompt_logprobs(logits[i : i + 1], [target], 3) == [score]


def test_no_rows_is_no_work_and_a_wrong_shape_is_refused() -> None:
    assert Sampler(8).sample(torch.empty(0, 8), []) == []
    with pytest.raises(ValueError, match=r"\[1, 8\]"):
        Sampler(8).sample(torch.zeros(1, 9), [row()])


@pytest.mark.parametrize("name", ["allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias"])
def test_token_ids_beyond_the_vocabulary_are_refused_by_name(name: str) -> None:
    value = {1000: 1.0} if name == "logit_bias" else [1000]
    with pytest.raises(InvalidRequest, match=f"{name}.*1000.*999"):
        check_token_ids(SamplingParams(**{name: value}), 1000)
    check_token_ids(SamplingParams(**{name: value}), 1001)
